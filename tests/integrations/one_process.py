"""Runs a training program in a process of its own, to its end, and reads what it left on its volume."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.bounds import HANG_SECONDS
from tests.harness.warm_python import warm_python
from tests.servers.process import free_port

from keepstep_api import names


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A program that has ended; `lines` are its stdout's, `errors` its stderr."""

    code: int
    lines: Sequence[str]
    errors: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OneProcess:
    """`program` is started as the only rank of a job. `libraries`: what it has imported before it begins."""

    program: Path
    volume: Path
    libraries: tuple[str, ...]

    @property
    def checkpoints(self) -> Path:
        return self.volume / names.CHECKPOINT_DIRECTORY

    def run(self, *arguments: object) -> Ended:
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        environment = {
            **os.environ,
            **ranks,
            names.ENV_VOLUME: str(self.volume),
            names.ENV_CHECKPOINT_DIRECTORY: str(self.checkpoints),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        words = [str(self.program), *map(str, arguments)]
        done = warm_python(*self.libraries).run(words, environment=environment, timeout_seconds=HANG_SECONDS)
        return Ended(code=done.returncode, lines=done.stdout.splitlines(), errors=done.stderr)

    def records(self) -> list[tuple[str, int, str]]:
        """(name, step, kind) of every recorded checkpoint, by step."""
        found: list[dict[str, Any]] = []
        for path in (self.volume / names.STATE_DIRECTORY / names.RECORDS_DIRECTORY).glob("*.json"):
            found.append(json.loads(path.read_text()))
        return sorted(((one["name"], one["step"], one["kind"]) for one in found), key=lambda one: one[1])
