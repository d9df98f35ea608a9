"""What a rank says of its steps: seldom, in a file of 32 bytes, and never at the cost of a step."""

from pathlib import Path

import pytest

from keepstep import Checkpointer
from keepstep.agent_client import step_file as told
from keepstep.agent_client.step_file import StepFile
from keepstep_api import names
from keepstep_api.step_file import SIZE_BYTES, Leaving, StepRecord, decode, encode


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1_700_000_000.0 + self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(told, "time", found)
    return found


def step_of(path: Path) -> int | None:
    record = decode(path.read_bytes())
    return None if record is None else record.step


def test_a_step_is_told_once_a_second_and_the_file_stays_as_large(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "0.step"
    steps = StepFile(path)
    assert path.read_bytes() == b""
    steps.tell(999_999)
    assert decode(path.read_bytes()) == StepRecord(step=999_999, at_unix=clock.time())
    clock.now += 0.9
    steps.tell(1_000_000)
    assert step_of(path) == 999_999
    clock.now += 0.2
    steps.tell(7)
    assert step_of(path) == 7
    assert len(path.read_bytes()) == SIZE_BYTES


def test_a_new_process_voids_what_the_last_one_told_and_so_does_an_end(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "0.step"
    StepFile(path).tell(5)
    steps = StepFile(path)
    assert path.read_bytes() == b""
    steps.tell(6)
    steps.end()
    steps.end()
    clock.now += 10
    steps.tell(8)
    assert path.read_bytes() == b""


@pytest.mark.parametrize("step", [-1, 10**12, float("nan"), "many", None])
def test_a_step_that_is_none_is_not_told_and_raises_nothing(tmp_path: Path, clock: Clock, step: object) -> None:
    path = tmp_path / "0.step"
    StepFile(path).tell(step)  # type: ignore[arg-type]
    assert path.read_bytes() == b""


def test_a_full_volume_or_a_missing_folder_costs_no_step(tmp_path: Path, clock: Clock) -> None:
    StepFile(Path("/dev/full")).tell(3)
    StepFile(tmp_path / "nowhere" / "0.step").tell(3)
    StepFile(None).tell(3)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"7", b"7 1.0", b"-7 1.0\n", b"7 nan\n", b"7 1e300\n", b"7 999999999999\n", b"\xff" * SIZE_BYTES),
        *(b"1234567890123 1.0\n", b"7  1.0\n", b"7 1.0\n\n", "\u0663 1.0\n".encode(), b"7 1.0\0\n"),
    ],
)
def test_what_is_no_such_line_says_nothing(content: bytes) -> None:
    assert decode(content) is None


def test_the_largest_step_fits() -> None:
    record = StepRecord(step=10**12 - 1, at_unix=99_999_999_999.25)
    assert decode(encode(record)) == record


def test_a_checkpointer_tells_its_steps_until_the_training_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(names.ENV_VOLUME, str(tmp_path))
    path = tmp_path / names.STATE_DIRECTORY / names.RANKS_DIRECTORY / "0.step"
    checkpointer = Checkpointer()
    assert path.read_bytes() == b""
    assert not checkpointer.should_save(12, every=0)
    assert step_of(path) == 12
    checkpointer.finish()
    assert path.read_bytes() == b""


def test_without_an_agent_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(names.ENV_VOLUME, raising=False)
    checkpointer = Checkpointer()
    checkpointer.should_save(12, every=0)
    checkpointer.finish()
    assert list(tmp_path.rglob("*.step")) == []


def test_the_file_of_a_process_that_has_left_says_whether_its_step_is_stored(tmp_path: Path, clock: Clock) -> None:
    for leaving in Leaving:
        path = tmp_path / f"{leaving.value}.step"
        steps = StepFile(path)
        steps.tell(6)
        # Less than a second ago the file was written; this is exact all the same.
        steps.tell(7)
        steps.leave(leaving)
        steps.end()
        steps.cut_short()
        assert decode(path.read_bytes()) == StepRecord(step=7, at_unix=clock.time(), leaving=leaving)


def test_the_file_of_a_process_that_is_cut_short_has_its_very_last_step(tmp_path: Path, clock: Clock) -> None:
    steps = StepFile(tmp_path / "0.step")
    steps.tell(6)
    steps.tell(7)
    steps.cut_short()
    record = decode((tmp_path / "0.step").read_bytes())
    assert record is not None
    assert (record.step, record.leaving) == (7, None)
