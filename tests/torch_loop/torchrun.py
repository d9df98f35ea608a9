"""A program under torchrun, to its end."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.harness.warm_python import warm_torchrun
from tests.servers.process import free_port

from keepstep_api import names

ROOT: Final = Path(__file__).parents[2]
_LIBRARIES: Final = (
    "torchdata.stateful_dataloader",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
)


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


def torchrun(
    program: Path,
    *arguments: str,
    directory: Path,
    ranks: int = 2,
    libraries: Sequence[str] = _LIBRARIES,
    **environment: str,
) -> Ended:
    """`directory` is where it saves; `libraries`: what the program imports. Skips the test where there is no torch."""
    pytest.importorskip("torch")
    words = ["-m", "tests.harness.warm_torchrun", f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1"]
    words += [f"--master-port={free_port()}", str(program), *arguments]
    return run(words, directory=directory, libraries=libraries, **environment)


def run(words: list[str], *, directory: Path, libraries: Sequence[str] = _LIBRARIES, **environment: str) -> Ended:
    """Run what `python` would with these words."""
    there = {
        **os.environ,
        names.ENV_CHECKPOINT_DIRECTORY: str(directory),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(HANG_SECONDS)),
        **environment,
    }
    done = warm_torchrun(*libraries).run(words, environment=there, timeout_seconds=HANG_SECONDS)
    return Ended(code=done.returncode, output=f"{done.stdout}\n{done.stderr}")
