"""Something of another kind in the place of a folder or file of Keepstep's own: it is moved aside, a line says so, and
the agent and restore start. A trainer may leave it on a volume that outlives its pod, and would end every start.
"""

import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from tests.harness.agent_process import AgentProcess, json_lines, tree, write_checkpoint
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.adapters.volume.own_entries import IN_OWN_FOLDER, IN_STATE_DIRECTORY, ON_THE_VOLUME

KINDS = ["file", "folder", "link", "dangling link", "fifo", "socket", "device"]
pytestmark = pytest.mark.slow

FOLDERS = {
    "": ON_THE_VOLUME,
    ".keepstep/": IN_OWN_FOLDER,
    ".keepstep/agent/": IN_STATE_DIRECTORY,
}
OWN = {f"{folder}{name}": kind for folder, kinds in FOLDERS.items() for name, kind in kinds.items()}
RIGHT = {stat.S_IFDIR: "folder", stat.S_IFREG: "file", stat.S_IFSOCK: "socket"}
WRONG = [(path, kind) for (path, right), kind in product(OWN.items(), KINDS) if kind != RIGHT[right]]
# Opened in a way of their own.
OFTEN = {".keepstep", ".keepstep/staged", ".keepstep/destination", ".keepstep/agent/journal.sqlite3"}


def make(path: Path, kind: str, elsewhere: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    match kind:
        case "file":
            path.write_bytes(b"the user's")
        case "folder":
            path.mkdir()
            (path / "users.txt").write_bytes(b"the user's")
        case "link":
            path.symlink_to(elsewhere)
        case "dangling link":
            path.symlink_to(elsewhere / "nowhere")
        case "fifo":
            os.mkfifo(path)
        case "socket":
            with pytest.MonkeyPatch.context() as patch, socket.socket(socket.AF_UNIX) as made:
                # Its path may be too long for a socket.
                patch.chdir(path.parent)
                made.bind(path.name)
        case "device":
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    (tmp_path / "bucket").mkdir()
    with AgentProcess(tmp_path / "volume", f"file://{tmp_path}/bucket", watch="off") as agent:
        yield agent


def save(agent: AgentProcess, step: int) -> None:
    source = write_checkpoint(agent.checkpoints / f"checkpoint-{step}", {"model.bin": 5000})
    agent.wait_committed(agent.announce(source, step).save)


def restore(agent: AgentProcess) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, "-m", "keepstep_agent", "restore", agent.destination, f"--volume={agent.volume}"]
    environment = {**os.environ, "KEEPSTEP_LOG_FORMAT": "json"}
    return subprocess.run(line, capture_output=True, text=True, timeout=HANG_SECONDS, check=False, env=environment)


@contextmanager
def spoiled(agent: AgentProcess, path: str, kind: str, elsewhere: Path) -> Iterator[None]:
    """Something wrong is at `path` of an agent's volume, and is found under another name in the end."""
    before = tree(elsewhere)
    remove(agent.volume / path)
    make(agent.volume / path, kind, elsewhere)
    found = (agent.volume / path).lstat()
    yield
    parent = (agent.volume / path).parent
    moved = [one for one in parent.iterdir() if one.name.startswith(f"{Path(path).name}.moved-aside-")]
    assert [(one.lstat().st_ino, one.lstat().st_mode) for one in moved] == [(found.st_ino, found.st_mode)]
    assert tree(elsewhere) == before


def selected() -> list[ParameterSet]:
    chosen = []
    for number, (path, kind) in enumerate(WRONG):
        # Of the others one kind each, another one for each path.
        marks = [] if path in OFTEN or number % len(KINDS) == 0 else [pytest.mark.nightly]
        if kind == "device":
            marks += [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")]
        chosen.append(pytest.param(path, kind, marks=marks))
    return chosen


@pytest.mark.parametrize(("path", "kind"), selected())
def test_what_is_of_the_wrong_kind_is_moved_aside_and_every_start_goes_on(
    agent: AgentProcess, tmp_path: Path, path: str, kind: str
) -> None:
    elsewhere = write_checkpoint(tmp_path / "elsewhere", {"of-another-run": 1000})
    save(agent, 1)
    agent.kill()
    with spoiled(agent, path, kind, elsewhere):
        agent.start()
        save(agent, 2)
        agent.kill()
    (said,) = agent.log("volume.moved_aside")
    assert said["path"] == str(agent.volume / path)
    remove(agent.checkpoints)
    for old in (agent.volume / path).parent.glob("*.moved-aside-*"):
        remove(old)
    with spoiled(agent, path, kind, elsewhere):
        done = restore(agent)
        assert done.returncode == 0, done.stderr
    assert [line["path"] for line in json_lines(done.stderr) if line.get("event") == "volume.moved_aside"] == [
        str(agent.volume / path)
    ]
    assert (agent.checkpoints / "checkpoint-2" / "model.bin").stat().st_size == 5000


@pytest.mark.parametrize("kind", ["file", "link", "dangling link", "fifo"])
def test_what_is_no_folder_of_the_volume_gives_way_to_the_checkpoint_directory(
    agent: AgentProcess, tmp_path: Path, kind: str
) -> None:
    """A trainer may leave it: the next pod on the volume saves and restores all the same."""
    elsewhere = write_checkpoint(tmp_path / "elsewhere", {"of-another-run": 1000})
    save(agent, 1)
    agent.kill()
    with spoiled(agent, "checkpoints", kind, elsewhere):
        done = restore(agent)
        assert done.returncode == 0, done.stderr
        assert (agent.checkpoints / "checkpoint-1" / "model.bin").stat().st_size == 5000
    for old in agent.volume.glob("*.moved-aside-*"):
        remove(old)
    with spoiled(agent, "checkpoints", kind, elsewhere):
        agent.start()
        save(agent, 2)
        agent.kill()


def test_what_is_above_the_checkpoint_directory_gives_way_too(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    (tmp_path / "bucket").mkdir()
    agent = AgentProcess(volume, f"file://{tmp_path}/bucket", watch="off", checkpoint_directory=volume / "a" / "b")
    agent.checkpoints = volume / "a" / "b"
    make(volume / "a", "file", tmp_path)
    with agent:
        save(agent, 1)
    (moved,) = volume.glob("a.moved-aside-*")
    assert moved.read_bytes() == b"the user's"


def test_a_link_to_another_folder_of_the_volume_stays(agent: AgentProcess) -> None:
    save(agent, 1)
    agent.kill()
    agent.checkpoints.rename(agent.volume / "elsewhere")
    agent.checkpoints.symlink_to("elsewhere")
    (agent.volume / "elsewhere" / "checkpoint-1" / "model.bin").unlink()
    assert restore(agent).returncode == 0
    agent.start()
    save(agent, 2)
    assert agent.checkpoints.is_symlink()
    assert not agent.log("volume.moved_aside")


def test_everything_that_agent_and_restore_leave_on_a_volume_is_in_the_table(agent: AgentProcess) -> None:
    save(agent, 1)
    remove(agent.checkpoints)
    assert restore(agent).returncode == 0
    agent.notify_termination(grace_seconds=HANG_SECONDS)
    left = {path.relative_to(agent.volume).as_posix(): path for path in agent.volume.glob(".keepstep/**/*")}
    ours = {name: path for name, path in left.items() if name.startswith(".keepstep/agent/") or name.count("/") == 1}
    assert {name: stat.S_IFMT(path.lstat().st_mode) for name, path in ours.items()}.items() <= OWN.items()
    agent.kill()
