"""A stand-in for a training process: it lives, holds the liveness lock, and dies when it is told to."""

import subprocess
import sys
from pathlib import Path
from typing import Self

from tests.harness.bounds import HANG_SECONDS

from keepstep_api.names import RANKS_DIRECTORY, STATE_DIRECTORY

_PROGRAM = """
import sys
from pathlib import Path
from keepstep.agent_client.liveness import hold_liveness_lock
assert hold_liveness_lock(Path(sys.argv[1]))
print("alive", flush=True)
sys.stdin.read()
"""


class TrainerProcess:
    """Alive inside the context: the real client's lock of one local rank, held by a process of its own."""

    def __init__(self, volume: Path, *, local_rank: int = 0) -> None:
        self._lock = volume / STATE_DIRECTORY / RANKS_DIRECTORY / str(local_rank)
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        command = [sys.executable, "-c", _PROGRAM, str(self._lock)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "alive\n", "the trainer does not hold its lock"
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def die(self) -> None:
        """SIGKILL, and wait for the end. Idempotent."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(HANG_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
