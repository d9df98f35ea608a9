"""What a process of another user does to a volume that everybody may write to, such as an emptyDir: files of the agent
stay its own. Only root can be two users.
"""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import pytest
from tests.harness.agent_process import AgentProcess, write_checkpoint
from tests.harness.bounds import HANG_SECONDS

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0 or which("setpriv") is None, reason="only root can be two users, by setpriv"),
]

ANOTHER = 65534


@pytest.fixture
def agent() -> Iterator[AgentProcess]:
    # Not below a folder of pytest's, which are root's alone.
    with tempfile.TemporaryDirectory(prefix="keepstep-two-users-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "bucket").mkdir()
        (folder / "volume").mkdir()
        (folder / "volume").chmod(0o777)
        with AgentProcess(folder / "volume", f"file://{folder}/bucket", watch="off") as agent:
            yield agent


def try_as_another(agent: AgentProcess, command: str) -> bool:
    """Whether a shell command that another user runs on the volume succeeds."""
    line = [f"--reuid={ANOTHER}", f"--regid={ANOTHER}", "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
    done = subprocess.run(
        ["setpriv", *line, "sh", "-c", command],
        cwd=agent.volume,
        capture_output=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    return done.returncode == 0


ATTACKS = [
    *(
        attack.format(mine=f".keepstep/{mine}")
        for mine in ("agent.sock", "reserve", "destination", "staged", "agent")
        for attack in ("rm -rf {mine} && test ! -e {mine}", "mv {mine} theirs", "ln -sfT /etc/passwd {mine}")
    ),
    "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\".keepstep/other.sock\")'",
    "echo x >> .keepstep/agent/journal.sqlite3",
    "cat .keepstep/agent/journal.sqlite3",
    "ln -s /etc/passwd .keepstep/agent/journal.sqlite3-journal",
    "echo '{}' > .keepstep/staged/forged.json",
    "rm -rf checkpoints/checkpoint-1/model.bin",
]


def test_another_user_changes_nothing_that_is_the_agents_and_the_agent_serves_on(agent: AgentProcess) -> None:
    save = agent.announce(write_checkpoint(agent.checkpoints / "checkpoint-1", {"model.bin": 5000}), 1).save
    agent.wait_committed(save)
    assert try_as_another(agent, "touch here && rm here"), "the volume is open to everybody"
    before = own_files(agent)
    assert [attack for attack in ATTACKS if try_as_another(agent, attack)] == []
    assert own_files(agent) == before
    save = agent.announce(write_checkpoint(agent.checkpoints / "checkpoint-2", {"model.bin": 5000}), 2).save
    agent.wait_committed(save)


def own_files(agent: AgentProcess) -> dict[str, tuple[int, int]]:
    found = {path.name: path.lstat() for path in (agent.volume / ".keepstep").iterdir()}
    return {name: (entry.st_ino, entry.st_mode) for name, entry in found.items()}
