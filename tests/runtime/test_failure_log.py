"""An outage is told, and not three thousand times."""

from structlog.testing import capture_logs

from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.runtime.engine.telemetry import FailureLog


def _work(number: int) -> WorkId:
    return WorkId(Operation.PUT_FILE, "save", 0, f"file-{number}")


def test_the_first_failure_of_a_kind_is_told_and_then_one_of_many_with_their_count() -> None:
    now = [0.0]
    failures = FailureLog(monotonic=lambda: now[0])
    with capture_logs() as lines:
        for number in range(1_000):
            failures.failed(_work(number), StoreError(ErrorKind.UNREACHABLE, "nobody listens"))
            now[0] += 1 / 128
    assert [(line["path"], line["suppressed"]) for line in lines] == [("file-0", 0), ("file-640", 639)]


def test_kinds_do_not_hide_each_other() -> None:
    failures = FailureLog(monotonic=lambda: 0.0)
    with capture_logs() as lines:
        for number, kind in enumerate((ErrorKind.UNREACHABLE, ErrorKind.FILE_CHANGED, ErrorKind.UNREACHABLE)):
            failures.failed(_work(number), StoreError(kind, "trouble"))
    assert [line["kind"] for line in lines] == ["unreachable", "file-changed"]
