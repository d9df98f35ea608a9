"""What the other users of a machine do to a `keepstep run`: a member of the user's group, with a umask that lets the
group write, and a stranger. Only root can be several users.
"""

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

import pytest
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.run_process import RunProcess

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0 or which("setpriv") is None, reason="only root can be several users"),
]

WIDE_UMASK = ("sh", "-c", 'umask 002; exec "$@"', "sh")
ANOTHER = 65534
OTHERS = {"a member of the user's group": 0, "a stranger": ANOTHER}
PYTHON = "/usr/bin/python3"
SECRET = "never-on-a-command-line"

CONNECT = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
LOCK = "import fcntl, os, sys; fcntl.lockf(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB)"
WRITE = "import sys; open(sys.argv[1], 'r+b').write(b'x')"
READ = "import sys; open(sys.argv[1], 'rb').read()"
LIST = "import os, sys; os.listdir(sys.argv[1])"
REPLACE = "import os, sys; os.rename(sys.argv[1], sys.argv[1] + '.theirs')"
SIGNAL = "import os, sys; os.kill(int(sys.argv[1]), 15)"
TRIES = [
    ("end the run by the agent's socket", CONNECT, ".keepstep/agent.sock"),
    ("ask the trainer to leave by the signal file", WRITE, ".keepstep/signal"),
    ("hold a rank's lock", LOCK, ".keepstep/ranks/0"),
    ("hold the volume's lock", LOCK, ".keepstep/agent/run.lock"),
    ("read the journal", READ, ".keepstep/agent/journal.sqlite3"),
    ("bind the volume to another destination", WRITE, ".keepstep/destination"),
    ("list what is staged", LIST, ".keepstep/staged"),
    ("list the records", LIST, ".keepstep/records"),
    ("replace Keepstep's folder", REPLACE, ".keepstep"),
]


@pytest.fixture(scope="module")
def run() -> Iterator[RunProcess]:
    # Not below a folder of pytest's, which are root's alone.
    with TemporaryDirectory(prefix="keepstep-users-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        environment = {"AWS_SECRET_ACCESS_KEY": SECRET}
        destination = f"file://{folder}/bucket"
        with RunProcess(folder / "volume", destination, prefix=WIDE_UMASK, environment=environment) as run:
            run.wait_steps(3)
            # This makes the signal file.
            save = [sys.executable, "-m", "keepstep_agent", "save", f"--volume={run.volume}"]
            subprocess.run(save, timeout=HANG_SECONDS, check=True)
            paths = [run.volume / path for _, _, path in TRIES]
            wait_until(lambda: all(path.exists() for path in paths), HANG_SECONDS, "all that is tried is there")
            yield run


def as_user(user: int, group: int, code: str, argument: str) -> "subprocess.CompletedProcess[str]":
    line = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
    line += ["--inh-caps=-all", PYTHON, "-c", code, argument]
    return subprocess.run(line, capture_output=True, text=True, timeout=HANG_SECONDS, check=False, cwd="/")


@pytest.mark.parametrize("group", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize(("code", "path"), [one[1:] for one in TRIES], ids=[one[0] for one in TRIES])
def test_another_user_of_the_machine_cannot(run: RunProcess, group: int, code: str, path: str) -> None:
    refused = as_user(ANOTHER, group, code, str(run.volume / path))
    assert "PermissionError" in refused.stderr, refused
    assert run.process.poll() is None


def test_the_user_can_do_each_of_these_but_hold_the_locks(run: RunProcess) -> None:
    """What is refused to others is there to be had."""
    for _, code, path in TRIES:
        if code in (CONNECT, READ, LIST):
            done = as_user(0, 0, code, str(run.volume / path))
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("group", OTHERS.values(), ids=OTHERS)
def test_another_user_sends_no_signal_to_a_process_of_the_run(run: RunProcess, group: int) -> None:
    for pid in (run.process.pid, *run.children()):
        assert "PermissionError" in as_user(ANOTHER, group, SIGNAL, str(pid)).stderr
        assert "PermissionError" in as_user(ANOTHER, group, READ, f"/proc/{pid}/environ").stderr


def test_no_command_line_of_the_run_shows_a_key(run: RunProcess) -> None:
    lines = run.children().values()
    assert any("agent" in line for line in lines)
    assert not any(SECRET in line for line in lines)


def test_a_socket_elsewhere_is_the_users_alone_too(tmp_path: Path) -> None:
    with TemporaryDirectory(prefix="keepstep-socket-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        path = folder / "s"
        destination = f"file://{tmp_path}/bucket"
        with RunProcess(tmp_path / "volume", destination, prefix=WIDE_UMASK, socket=path) as run:
            run.wait_steps(3)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            for group in OTHERS.values():
                assert "PermissionError" in as_user(ANOTHER, group, CONNECT, str(path)).stderr
            with socket.socket(socket.AF_UNIX) as own:
                own.connect(str(path))


def test_on_a_volume_that_others_may_write_the_socket_is_the_users_alone(tmp_path: Path) -> None:
    with TemporaryDirectory(prefix="keepstep-open-") as name:
        volume = Path(name) / "volume"
        volume.parent.chmod(0o755)
        volume.mkdir()
        volume.chmod(0o777)
        with RunProcess(volume, f"file://{tmp_path}/bucket", prefix=WIDE_UMASK) as run:
            run.wait_steps(3)
            for group in OTHERS.values():
                refused = as_user(ANOTHER, group, CONNECT, str(volume / ".keepstep/agent.sock"))
                assert "PermissionError" in refused.stderr
