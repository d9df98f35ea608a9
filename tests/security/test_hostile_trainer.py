"""What a trainer can do to the volume, with the agent's own user and any timing: only its own checkpoints suffer.

The trainer is this test: another process than the agent, which may write everything below the volume. The agent can
read more than it should tell: a secret beside the volume, and another run's files.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from tests.harness.agent_process import AgentProcess, tree, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.harness.deep_folders import deep_folders

from keepstep_agent.core.agent.events import Announced
from keepstep_agent.runtime.engine.event_codec import decode_event, encode_event

SECRET = b"aws_secret_access_key = " + b"never-in-the-bucket" * 10
FORGED = "forged-1"
TRIES = 60


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    folder = tmp_path / "secret"
    folder.mkdir()
    (folder / "model.bin").write_bytes(SECRET)
    return folder / "model.bin"


@pytest.fixture
def other_run(tmp_path: Path) -> Path:
    """Another run's folder, laid out as the attacker would like it."""
    folder = tmp_path / "other-run"
    write_checkpoint(folder / "checkpoint-7" / "rank-00000", {"weights.bin": 1000})
    write_checkpoint(folder / "checkpoint-8", {"weights.bin": 1000})
    return folder


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    (tmp_path / "bucket").mkdir()
    with AgentProcess(tmp_path / "volume", f"file://{tmp_path}/bucket", watch="off") as agent:
        yield agent


def stored_bytes(tmp_path: Path) -> bytes:
    return b"".join(path.read_bytes() for path in (tmp_path / "bucket").rglob("*") if path.is_file())


def save_honestly(agent: AgentProcess, step: int) -> None:
    """What the agent is there for still works."""
    source = write_checkpoint(agent.checkpoints / f"checkpoint-{step}", {"model.bin": 5000})
    save = agent.announce(source, step).save
    agent.wait_committed(save)


@contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """A trainer that does this again and again."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            act()

    trainer = threading.Thread(target=run)
    trainer.start()
    try:
        yield
    finally:
        stop.set()
        trainer.join(HANG_SECONDS)


def announce_often(agent: AgentProcess, path: Path) -> None:
    for number in range(TRIES):
        with suppress(grpc.RpcError):
            agent.announce(path, number, save=f"try-{number}")


def forge(agent: AgentProcess, secret: Path, make_pin: Callable[[Path], None]) -> None:
    """A descriptor like the agent's own, of a save that never was; `make_pin` is given where its one pin lies."""
    staged = agent.volume / ".keepstep" / "staged"
    (real,) = staged.glob("*/rank-00000.json")
    status = secret.stat()
    value = json.loads(real.read_text())
    (record,) = value["descriptor"]["announcements"]
    announced = decode_event(record.encode())
    assert isinstance(announced, Announced)
    # With the checksum that a record has: its form is no secret.
    forged = replace(announced, info=replace(announced.info, save=FORGED))
    value["descriptor"]["announcements"] = [encode_event(forged).decode()]
    value["files"] |= {
        "folder": f".keepstep/staged/{FORGED}/rank-00000",
        "paths": ["model.bin"],
        "sizes_bytes": [status.st_size],
        "mtimes_ns": [status.st_mtime_ns],
        "inodes": [status.st_ino],
    }
    (staged / FORGED).mkdir()
    make_pin(staged / FORGED / "rank-00000" / "model.bin")
    (staged / FORGED / "rank-00000.json").write_text(json.dumps(value))


def link_file(pin: Path, secret: Path) -> None:
    pin.parent.mkdir()
    pin.symlink_to(secret)


def link_folder(pin: Path, secret: Path) -> None:
    pin.parent.symlink_to(secret.parent)


@pytest.mark.parametrize("link", [link_file, link_folder])
def test_a_forged_descriptor_brings_nothing_into_the_bucket_that_is_not_on_the_volume(
    tmp_path: Path, secret: Path, link: Callable[[Path, Path], None]
) -> None:
    (tmp_path / "bucket").mkdir()
    destination = f"file://{tmp_path}/bucket"
    with AgentProcess(tmp_path / "volume", destination, watch="off", bandwidth_bytes_per_second=10) as slow:
        # The first file goes out at once, and the second one waits for minutes until it is paid for.
        slow.announce(write_checkpoint(slow.checkpoints / "checkpoint-1", {"model.bin": 5000, "second.bin": 5000}), 1)
        slow.kill()
        forge(slow, secret, lambda pin: link(pin, secret))
        # As on a claim whose pod was replaced: only without their journal are descriptors asked at all.
        for journal in (slow.volume / ".keepstep").rglob("journal.sqlite3*"):
            journal.unlink()
    with AgentProcess(tmp_path / "volume", destination, watch="off") as agent:
        save_honestly(agent, 2)
        agent.terminate()
        agent.wait(HANG_SECONDS)
    assert SECRET not in stored_bytes(tmp_path)
    # It was read as a descriptor, and failed by its pin.
    assert FORGED in agent.log_text()
    assert not agent.log("staging.unknown_descriptor")


def test_a_folder_that_is_swapped_for_a_link_at_any_moment_never_leads_to_the_secret(
    tmp_path: Path, agent: AgentProcess, secret: Path
) -> None:
    shown, aside = agent.checkpoints / "checkpoint-1", agent.volume / "aside"
    real = write_checkpoint(agent.volume / "real", {"model.bin": len(SECRET)})
    shown.symlink_to(real)

    def swap() -> None:
        for target in (secret.parent, real):
            aside.unlink(missing_ok=True)
            aside.symlink_to(target)
            aside.rename(shown)

    with meanwhile(swap):
        announce_often(agent, shown)
    save_honestly(agent, TRIES + 1)
    assert SECRET not in stored_bytes(tmp_path)


def test_a_real_folder_whose_own_name_is_swapped_never_leads_to_the_secret(
    tmp_path: Path, agent: AgentProcess, secret: Path
) -> None:
    """The same with a folder in the middle of the path, moved away and back."""
    shown = write_checkpoint(agent.checkpoints / "checkpoint-1" / "deep", {"model.bin": len(SECRET)})
    aside = agent.volume / "aside"

    def swap() -> None:
        shown.rename(aside)
        shown.symlink_to(secret.parent)
        shown.unlink()
        aside.rename(shown)

    with meanwhile(swap):
        announce_often(agent, shown.parent)
    save_honestly(agent, TRIES + 1)
    assert SECRET not in stored_bytes(tmp_path)


def test_a_folder_of_pins_that_is_swapped_for_a_link_never_leads_to_the_secret(
    tmp_path: Path, agent: AgentProcess, secret: Path
) -> None:
    """Whatever the moment: before the pins are made, before they are made durable, before they are sent."""
    shown = write_checkpoint(agent.checkpoints / "checkpoint-1", {"model.bin": len(SECRET)})
    numbers = itertools.cycle(range(TRIES))

    def swap() -> None:
        number = next(numbers)
        pins = agent.volume / ".keepstep" / "staged" / f"try-{number}" / "rank-00000"
        with suppress(OSError):
            pins.rename(agent.volume / f"away-{number}")
            pins.symlink_to(secret.parent)

    with meanwhile(swap):
        announce_often(agent, shown)
    save_honestly(agent, TRIES + 1)
    assert SECRET not in stored_bytes(tmp_path)


def test_a_link_in_the_place_of_the_staged_folder_deletes_nothing_of_another_run(
    tmp_path: Path, agent: AgentProcess, other_run: Path
) -> None:
    before = tree(other_run)
    save_honestly(agent, 1)
    agent.kill()
    staged = agent.volume / ".keepstep" / "staged"
    shutil.rmtree(staged, ignore_errors=True)
    staged.symlink_to(other_run)
    agent.start()
    save_honestly(agent, 2)
    assert tree(other_run) == before
    assert [line["path"] for line in agent.log("volume.moved_aside")] == [str(staged)]


@pytest.mark.parametrize("name", ["incoming", "records", "agent"])
def test_a_link_in_the_place_of_restores_own_folders_deletes_nothing_of_another_run(
    tmp_path: Path, agent: AgentProcess, other_run: Path, name: str
) -> None:
    save_honestly(agent, 1)
    agent.kill()
    before = tree(other_run)
    mine = agent.volume / ".keepstep" / name
    shutil.rmtree(mine, ignore_errors=True)
    mine.symlink_to(other_run)
    shutil.rmtree(agent.checkpoints)
    line = [sys.executable, "-m", "keepstep_agent", "restore", agent.destination, f"--volume={agent.volume}"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert "volume.moved_aside" in done.stderr
    assert tree(other_run) == before
    assert (agent.checkpoints / "checkpoint-1" / "model.bin").stat().st_size == 5000


@pytest.mark.parametrize("name", ["signal", "reserve", "reserve.partial", "destination", ".writable"])
def test_a_link_in_the_place_of_a_file_of_ours_changes_nothing_where_it_leads(
    agent: AgentProcess, other_run: Path, name: str
) -> None:
    agent.kill()
    before = tree(other_run)
    mine = agent.volume / ".keepstep" / name
    mine.unlink(missing_ok=True)
    mine.symlink_to(other_run / "checkpoint-8" / "weights.bin")
    agent.start()
    save_honestly(agent, 1)
    agent.notify_termination(grace_seconds=5)
    assert tree(other_run) == before


@pytest.mark.parametrize("beside", ["", "-wal", "-journal"])
@pytest.mark.parametrize("leads_to", ["weights.bin", "not-there"])
def test_a_link_in_the_place_of_the_journal_is_moved_aside_and_never_followed(
    agent: AgentProcess, other_run: Path, beside: str, leads_to: str
) -> None:
    agent.kill()
    (other_run / "checkpoint-8" / "weights.bin").write_bytes(b"")  # which SQLite would take for a new database
    before = tree(other_run)
    journal = agent.volume / ".keepstep" / "agent" / "journal.sqlite3"
    for left in journal.parent.iterdir():
        left.unlink()
    link = journal.with_name(journal.name + beside)
    link.symlink_to(other_run / "checkpoint-8" / leads_to)
    agent.start()
    save_honestly(agent, 1)
    assert tree(other_run) == before
    assert [line["path"] for line in agent.log("volume.moved_aside")] == [str(link)]


@pytest.mark.parametrize("name", ["resumed.json", "resumed.json.partial"])
def test_a_link_in_the_place_of_what_was_resumed_changes_nothing_where_it_leads(
    agent: AgentProcess, other_run: Path, name: str
) -> None:
    save_honestly(agent, 1)
    agent.kill()
    before = tree(other_run)
    (agent.volume / ".keepstep" / "agent" / name).symlink_to(other_run / "checkpoint-8" / "weights.bin")
    line = [sys.executable, "-m", "keepstep_agent", "restore", agent.destination, f"--volume={agent.volume}"]
    assert subprocess.run(line, capture_output=True, timeout=HANG_SECONDS, check=False).returncode == 0
    assert tree(other_run) == before
    resumed = agent.volume / ".keepstep" / "agent" / "resumed.json"
    assert not resumed.is_symlink()
    assert json.loads(resumed.read_bytes())["step"] == 1


@pytest.mark.parametrize("name", ["records/x.json", "ranks/0", "ranks/1000000000000000000", "staged/x"])
def test_a_fifo_in_the_place_of_what_trainers_write_hangs_nobody(agent: AgentProcess, name: str) -> None:
    agent.kill()
    mine = agent.volume / ".keepstep" / name
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.unlink(missing_ok=True)
    os.mkfifo(mine)
    agent.start()
    save_honestly(agent, 1)


def test_a_folder_of_any_depth_among_the_pins_ends_no_agent(agent: AgentProcess) -> None:
    agent.kill()
    with deep_folders(agent.volume / ".keepstep" / "staged" / "deep" / "rank-00007") as deep:
        agent.start()
        assert not deep.exists()
        save_honestly(agent, 1)


def test_a_folder_of_any_depth_in_the_place_of_what_restore_gathers_ends_no_restore(agent: AgentProcess) -> None:
    save_honestly(agent, 1)
    agent.kill()
    shutil.rmtree(agent.checkpoints)
    with deep_folders(agent.volume / ".keepstep" / "incoming" / "x") as deep:
        line = [sys.executable, "-m", "keepstep_agent", "restore", agent.destination, f"--volume={agent.volume}"]
        restored = subprocess.run(line, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
        assert "Traceback" not in restored.stderr
        assert restored.returncode == 0
        assert not deep.exists()
    assert (agent.checkpoints / "checkpoint-1" / "model.bin").stat().st_size == 5000


def test_a_checkpoint_of_any_depth_is_refused_and_the_next_one_stored(agent: AgentProcess) -> None:
    with deep_folders(agent.checkpoints / "checkpoint-1") as deep:
        with pytest.raises(grpc.RpcError, match="nested folders"):
            agent.announce(deep, 1)
        save_honestly(agent, 2)
    assert "Traceback" not in agent.log_text()


def test_a_path_through_any_number_of_links_ends_no_agent(tmp_path: Path, agent: AgentProcess) -> None:
    links = tmp_path / "links"
    links.mkdir()
    (links / "0").symlink_to(agent.checkpoints)
    for number in range(1, 3_000):
        (links / str(number)).symlink_to(links / str(number - 1))
    # Python 3.13 follows any number of them, to a folder without a file.
    with pytest.raises(grpc.RpcError, match=r"too many links|has no files"):
        agent.announce(links / "2999", 1)
    save_honestly(agent, 2)
    assert "Traceback" not in agent.log_text()
