"""A program under torchrun, to its end."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from tests.servers.process import free_port

from mooring_api import names

ROOT: Final = Path(__file__).parents[2]
END_SECONDS: Final = 200.0
"""Bounds a hang and judges no speed: two ranks import torch, on a machine that others load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A job that is over; torchrun's code is 1 whichever way a rank failed."""

    code: int
    output: str
    """What the ranks print, then what they and torchrun write to stderr."""

    def lines(self, word: str) -> list[str]:
        """What the lines of the output that begin with `word` say after it, sorted: ranks print in any order."""
        found = [line.removeprefix(word) for line in self.output.splitlines() if line.startswith(word)]
        return sorted(line.strip() for line in found)


def torchrun(program: Path, *arguments: str, directory: Path, ranks: int = 2, **environment: str) -> Ended:
    """`directory` is where it saves. Skips the test where there is no torch."""
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1"]
    command += [f"--master-port={free_port()}", str(program), *arguments]
    return run(command, directory=directory, **environment)


def run(command: list[str], *, directory: Path, **environment: str) -> Ended:
    """Nothing of it is left when it returns, but what made a process group of its own and is about to see its end."""
    process = subprocess.Popen(
        command,
        env={
            **os.environ,
            names.ENV_CHECKPOINT_DIRECTORY: str(directory),
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(ROOT),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "100",
            **environment,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        # Apart: Python's own print is two writes, and a line of another process's stderr fits in between.
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        raise AssertionError(f"it does not end:\n{output}\n{errors}") from None
    return Ended(code=process.returncode, output=f"{output}\n{errors}")
