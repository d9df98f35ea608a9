"""The volume's small instruments: how full it is, who lives, and the signal file."""

import json
import mmap
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep_agent.adapters.liveness import RankLocks
from keepstep_agent.adapters.signal_file import SignalFile
from keepstep_agent.adapters.volume.disk import VolumeMeter
from keepstep_agent.core.errors import ErrorKind, VolumeError
from keepstep_agent.runtime.process.app import SystemClock
from keepstep_api.signal_file import SaveSignal, decode


def _du(path: Path) -> int:
    return int(subprocess.run(["du", "-s", "-B1", str(path)], check=True, capture_output=True).stdout.split()[0])


def test_used_bytes_are_what_du_says(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "data").write_bytes(os.urandom(300_000))
    (tmp_path / "small").write_bytes(b"x")
    (tmp_path / "twin").hardlink_to(tmp_path / "folder" / "data")
    (tmp_path / "link").symlink_to("/")
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.truncate(1 << 30)
    reading = VolumeMeter(tmp_path).measure()
    assert reading.used_bytes == _du(tmp_path)
    assert 300_000 <= reading.used_bytes < 400_000
    assert 0 < reading.free_bytes <= reading.total_bytes


def test_files_that_vanish_during_the_walk_are_no_error(tmp_path: Path) -> None:
    # On some filesystems a folder has no blocks of its own.
    (tmp_path / "kept").write_bytes(b"x")
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            folder = tmp_path / "checkpoint"
            folder.mkdir()
            for number in range(20):
                (folder / str(number)).write_bytes(b"x")
            for number in range(20):
                (folder / str(number)).unlink()
            folder.rmdir()

    meter = VolumeMeter(tmp_path)
    trainer = threading.Thread(target=churn)
    trainer.start()
    try:
        assert all(meter.measure().used_bytes > 0 for _ in range(200))
    finally:
        stop.set()
        trainer.join()


_ORDINARY_USER = """
import json, os, sys
from pathlib import Path
import structlog
from keepstep_agent.adapters.volume.disk import VolumeMeter
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
with structlog.testing.capture_logs() as logs:
    meter = VolumeMeter(Path(sys.argv[1]))
    used_bytes = [meter.measure().used_bytes for _ in range(2)]
print(json.dumps({"used_bytes": used_bytes, "folders": [line["folder"] for line in logs]}))
"""


def test_a_folder_that_is_not_ours_to_read_is_left_out_and_said_once() -> None:
    # Not below tmp_path, into which only its owner may look.
    with tempfile.TemporaryDirectory() as name:
        volume = Path(name)
        volume.chmod(0o755)
        (volume / "data").write_bytes(os.urandom(300_000))
        (volume / "lost+found").mkdir()
        (volume / "lost+found" / "data").write_bytes(os.urandom(900_000))
        (volume / "lost+found").chmod(0o000)
        line = [sys.executable, "-c", _ORDINARY_USER, name]
        found = json.loads(subprocess.run(line, check=True, capture_output=True).stdout)
        (volume / "lost+found").chmod(0o700)
    assert found["folders"] == [f"{volume}/lost+found"]
    assert all(300_000 <= used_bytes < 400_000 for used_bytes in found["used_bytes"])


def test_a_volume_that_is_not_there_is_the_volumes_error(tmp_path: Path) -> None:
    with pytest.raises(VolumeError) as caught:
        VolumeMeter(tmp_path / "missing").measure()
    assert caught.value.kind is ErrorKind.FILE_MISSING


_TRAINER = """
import fcntl, os, sys, time
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX)
child = os.fork()
if child == 0:
    time.sleep(600)
    os._exit(0)
print(child, flush=True)
time.sleep(600)
"""


class _Trainer:
    """A process that holds a rank's lock, and its forked child, which must not count."""

    def __init__(self, lock: Path) -> None:
        lock.parent.mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen([sys.executable, "-c", _TRAINER, str(lock)], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.child = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def trainers(tmp_path: Path) -> Iterator[list[_Trainer]]:
    started = [_Trainer(tmp_path / ".keepstep" / "ranks" / name) for name in ("0", "11")]
    yield started
    for trainer in started:
        trainer.kill()
        os.kill(trainer.child, signal.SIGKILL)
        assert trainer.process.stdout is not None
        trainer.process.stdout.close()


def test_a_lock_is_held_until_its_process_is_killed_though_a_forked_child_lives(
    tmp_path: Path, trainers: list[_Trainer]
) -> None:
    locks = RankLocks(tmp_path)
    (tmp_path / ".keepstep" / "ranks" / "3").touch()
    (tmp_path / ".keepstep" / "ranks" / "not-a-rank").touch()
    assert locks.live_ranks() == {0, 11}
    trainers[1].kill()
    os.kill(trainers[1].child, 0)
    assert locks.live_ranks() == {0}


def test_asking_never_takes_the_lock(tmp_path: Path) -> None:
    locks = RankLocks(tmp_path)
    lock = tmp_path / ".keepstep" / "ranks" / "0"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert not locks.live_ranks()
    trainer = _Trainer(lock)
    try:
        assert all(locks.live_ranks() == {0} for _ in range(1000))
    finally:
        trainer.kill()
        os.kill(trainer.child, signal.SIGKILL)
        assert trainer.process.stdout is not None
        trainer.process.stdout.close()


def test_nobody_lives_on_a_new_volume(tmp_path: Path) -> None:
    assert RankLocks(tmp_path).live_ranks() == frozenset()


def test_a_mapped_signal_file_shows_every_request_and_the_count_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / ".keepstep" / "signal"
    assert SignalFile(tmp_path).current() == SaveSignal()
    assert SignalFile(tmp_path).request(deadline_unix=0.0, terminating=False) == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert [entry.name for entry in path.parent.iterdir()] == ["signal"]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert decode(mapped[:]) == SaveSignal(number=1)
        assert SignalFile(tmp_path).request(deadline_unix=123.5, terminating=True) == 2
        assert decode(mapped[:]) == SaveSignal(number=2, deadline_unix=123.5, terminating=True)
    assert SignalFile(tmp_path).current() == SaveSignal(number=2, deadline_unix=123.5, terminating=True)


@pytest.mark.parametrize("content", [b"", b"garbage", b"x" * 64, b"y" * 100])
def test_a_spoilt_signal_file_is_mended_in_place(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / ".keepstep" / "signal"
    path.parent.mkdir()
    path.write_bytes(content)
    inode = path.stat().st_ino
    assert SignalFile(tmp_path).request(deadline_unix=7.0, terminating=True) == 1
    assert SignalFile(tmp_path).current() == SaveSignal(number=1, deadline_unix=7.0, terminating=True)
    assert path.stat().st_ino == inode
    assert path.stat().st_size >= 64


def test_a_new_pod_takes_back_the_old_ones_notice_without_ringing(tmp_path: Path) -> None:
    path = tmp_path / ".keepstep" / "signal"
    path.parent.mkdir()
    signals = SignalFile(tmp_path)
    signals.forget_termination()
    assert not path.exists()
    number = signals.request(deadline_unix=time.time() + 30, terminating=True)
    signals.forget_termination()
    assert signals.current() == SaveSignal(number=number)


def test_a_signal_file_that_cannot_be_written_is_the_volumes_error(tmp_path: Path) -> None:
    (tmp_path / ".keepstep").touch()
    with pytest.raises(VolumeError):
        SignalFile(tmp_path).request(deadline_unix=0.0, terminating=False)


def test_the_clock_is_the_wall_clock() -> None:
    before = time.time()
    now = SystemClock().now()
    assert before - 1 < now < time.time() + 1
