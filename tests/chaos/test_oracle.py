"""The oracle of chaos can say no: each loss that it looks for is planted into a bucket, and it finds each."""

import threading
from pathlib import Path

import pytest
from tests.chaos.command import Command, has_traceback
from tests.chaos.content import rank_files
from tests.chaos.job import Job
from tests.chaos.oracle import Marker, Oracle, Truth, markers_read
from tests.chaos.report import Loss, Report
from tests.harness.agent_process import AgentProcess
from tests.harness.bucket_view import BucketView
from tests.servers.faults import Request
from tests.servers.server import Bucket

pytestmark = pytest.mark.nightly

RUN = "run-1"
STEPS = (1, 2, 3)
KEEP_LAST = 2


@pytest.fixture
def truth() -> Truth:
    return Truth(run=RUN, world_size=1)


@pytest.fixture
def report() -> Report:
    return Report()


@pytest.fixture
def oracle(rclone_bucket: Bucket, truth: Truth, report: Report, monkeypatch: pytest.MonkeyPatch) -> Oracle:
    # Nothing dies here: what looks wrong once is wrong.
    monkeypatch.setattr("tests.chaos.oracle._LOOK_SECONDS", 0.0)
    return Oracle(rclone_bucket, truth, report, keep_last=KEEP_LAST)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A destination with three committed checkpoints, in a directory; they show all kinds of files."""
    directory = tmp_path_factory.mktemp("stored")
    with AgentProcess(directory / "volume", f"file://{directory}/destination") as agent:
        for step in STEPS:
            path = agent.checkpoints / f"checkpoint-{step}"
            for name, body in rank_files(RUN, attempt(step), step, 0).items():
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                (path / name).write_bytes(body)
            agent.announce(path, step, save=f"save-{step}")
        for step in STEPS:
            agent.wait_committed(f"save-{step}")
    return directory / "destination"


@pytest.fixture
def markers(stored: Path, rclone_bucket: Bucket, truth: Truth, oracle: Oracle) -> list[Marker]:
    """The same in a bucket, found good by the oracle, the oldest first."""
    for step in STEPS:
        truth.begun[f"save-{step}"] = (attempt(step), step)
        truth.acknowledged[f"save-{step}"] = {0}
    for path in stored.rglob("*"):
        if path.is_file():
            put(rclone_bucket, path.relative_to(stored).as_posix(), path.read_bytes())
    oracle.look()
    return sorted(oracle.present.values())


def attempt(step: int) -> str:
    """One whose checkpoint of this step has files of several parts, small ones in archives, or neither."""
    shape = {1: "many", 2: "parts", 3: "few"}[step]
    for number in range(1000):
        files = rank_files(RUN, f"attempt-{number}", step, 0)
        large = max(map(len, files.values())) > 1 << 20
        if shape == ("many" if len(files) > 10 else "parts" if large else "few"):
            return f"attempt-{number}"
    raise AssertionError(shape)


def losses(report: Report) -> list[Loss]:
    return [loss for loss, _ in report.losses]


def largest_object(bucket: Bucket, step: int) -> tuple[str, bytearray]:
    """Of a checkpoint, which has what the trainer wrote."""
    view = BucketView(bucket)
    keys = [key for key in view.keys(f"checkpoint-{step}/") if "/.keepstep/manifest-" not in key]
    bodies = {key: bytearray(view.read(key)) for key in keys}
    return max(bodies.items(), key=lambda item: len(item[1]))


def test_what_is_committed_and_whole_is_no_loss(oracle: Oracle, markers: list[Marker], report: Report) -> None:
    oracle.look(again=True)

    assert [marker.step for marker in markers] == list(STEPS)
    assert losses(report) == []
    assert report.counts["checkpoints committed"] == len(STEPS)


@pytest.mark.parametrize("step", STEPS)
def test_a_flipped_byte_in_a_committed_checkpoint_is_a_loss(
    rclone_bucket: Bucket, oracle: Oracle, markers: list[Marker], report: Report, step: int
) -> None:
    key, body = largest_object(rclone_bucket, step)
    # Past the first header of an archive, whose padding is nobody's.
    body[512] ^= 1
    put(rclone_bucket, key, bytes(body))

    oracle.look(again=True)

    assert losses(report) == [Loss.BROKEN]
    assert markers[step - 1].key in report.losses[0][1]


def test_a_committed_object_that_was_cut_short_is_a_loss(
    rclone_bucket: Bucket, oracle: Oracle, markers: list[Marker], report: Report
) -> None:
    key, body = largest_object(rclone_bucket, 3)
    put(rclone_bucket, key, bytes(body[:-1]))

    oracle.look(again=True)

    assert losses(report) == [Loss.BROKEN]


@pytest.mark.parametrize("what", ["/.keepstep/manifest-", "model"])
def test_a_missing_object_of_a_committed_checkpoint_is_a_loss(
    rclone_bucket: Bucket, oracle: Oracle, markers: list[Marker], report: Report, what: str
) -> None:
    view = BucketView(rclone_bucket)
    view.delete(next(key for key in view.keys("checkpoint-3/") if what in key))

    oracle.look(again=True)

    assert losses(report) == [Loss.BROKEN]
    assert "missing" in report.losses[0][1]


def test_a_marker_of_a_save_that_nobody_began_is_a_loss(
    oracle: Oracle, markers: list[Marker], report: Report, truth: Truth
) -> None:
    del truth.begun["save-2"]

    oracle.look(again=True)

    assert losses(report) == [Loss.BROKEN]


@pytest.mark.parametrize(("step", "expected"), [(1, []), (2, [Loss.VANISHED]), (3, [Loss.VANISHED])])
def test_a_marker_may_vanish_when_enough_newer_ones_are_there(
    rclone_bucket: Bucket, oracle: Oracle, markers: list[Marker], report: Report, step: int, expected: list[Loss]
) -> None:
    BucketView(rclone_bucket).delete(markers[step - 1].key.removeprefix(f"{rclone_bucket.prefix}/"))

    oracle.look()

    assert losses(report) == expected


def test_an_acknowledged_save_is_owed_until_it_is_committed(
    truth: Truth, oracle: Oracle, markers: list[Marker]
) -> None:
    truth.begun["save-4"] = ("attempt-4", 4)
    truth.acknowledged["save-4"] = {0}

    assert truth.owed() - oracle.ever == {"save-4"}
    truth.excused.add("save-4")
    assert truth.owed() - oracle.ever == set()


def test_a_restore_of_an_older_checkpoint_or_of_other_bytes_is_a_loss(
    rclone_bucket: Bucket,
    truth: Truth,
    oracle: Oracle,
    markers: list[Marker],
    report: Report,
    tmp_path: Path,
) -> None:
    destination, endpoint = rclone_bucket.destination, rclone_bucket.endpoint_url
    job = Job(tmp_path, rclone_bucket, endpoint, truth=truth, oracle=oracle, report=report, seed=1)
    command = Command(
        tmp_path, "restore", destination, f"--endpoint-url={endpoint}", f"--volume={tmp_path}/v", "--json"
    )
    ended = threading.Event()
    while not command.ended(report):
        ended.wait(0.05)

    assert job.judge_restore(command, newest_before=3)
    assert losses(report) == []
    job.judge_restore(command, newest_before=4)
    assert losses(report) == [Loss.OLD_RESTORE]
    file = next(path for path in (tmp_path / "v" / "checkpoints").rglob("model*") if path.is_file())
    file.write_bytes(b"something else")
    job.judge_restore(command, newest_before=3)
    assert losses(report) == [Loss.OLD_RESTORE, Loss.WRONG_RESTORE]


def test_what_nobody_handled_is_told_from_what_asyncio_notes() -> None:
    traceback = "Traceback (most recent call last):\n  File …\nOSError: no\n"

    assert not has_traceback(f"Task exception was never retrieved\n{traceback}")
    assert has_traceback(traceback)
    assert has_traceback(f"Task exception was never retrieved\n{traceback}{traceback}")


def put(bucket: Bucket, key: str, body: bytes) -> None:
    bucket.client().put_object(Bucket=bucket.name, Key=f"{bucket.prefix}/{key}", Body=body)


def test_a_marker_that_was_read_was_there() -> None:
    def request(method: str, save: str, status: int) -> Request:
        path = f"/bucket/runs/one/.keepstep/commits/000000000012.{save}.json"
        return Request(method=method, path=path, query="", headers={}, status=status)

    answers = [("GET", "read", 200), ("GET", "missing", 404), ("GET", "away", 503), ("PUT", "written", 200)]
    assert markers_read([request(*answer) for answer in answers]) == {"read"}
