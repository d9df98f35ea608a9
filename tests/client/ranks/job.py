"""Real ranks of a small job, stepped by the test: processes with torch's own store and collectives, no torchrun."""

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.harness.warm_python import warm_python
from tests.servers.process import free_port

_TRAINER = Path(__file__).with_name("trainer.py")


class Rank:
    """One process; what it printed is read line by line."""

    def __init__(self, scenario: str, environment: dict[str, str], log: Path) -> None:
        self._log = log
        (stdin, ours), (theirs, stdout) = os.pipe(), os.pipe()
        self._stdin, self._stdout = os.fdopen(ours, "w"), os.fdopen(theirs)
        try:
            with log.open("ab") as errors:
                self.process = warm_python("torch", "torch.distributed").start(
                    [str(_TRAINER), scenario],
                    environment={**os.environ, **environment},
                    files=[stdin, stdout, errors.fileno()],
                )
        finally:
            os.close(stdin)
            os.close(stdout)
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def line(self) -> str | None:
        """The next one; None when it has ended."""
        return self._lines.get(timeout=HANG_SECONDS)

    def wait_for(self, wanted: str) -> list[str]:
        """All lines up to the one that begins with `wanted`."""
        seen: list[str] = []
        while not (seen and seen[-1].startswith(wanted)):
            line = self.line()
            assert line is not None, f"it ended without {wanted!r}: {seen}\n{self.log_text()}"
            seen.append(line)
        return seen

    def go(self, steps: int = 1) -> None:
        """Let so many steps begin; a rank that has left needs none."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write("\n" * steps)
            self._stdin.flush()

    def rest(self) -> list[str]:
        """All lines until it ends."""
        lines: list[str] = []
        while (line := self.line()) is not None:
            lines.append(line)
        return lines

    def exit_code(self) -> int:
        return self.process.wait(HANG_SECONDS)

    def log_text(self) -> str:
        return self._log.read_text()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(HANG_SECONDS)
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    def _read(self) -> None:
        with self._stdout as lines:
            for line in lines:
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)


@contextmanager
def job(
    scenario: str, directory: Path, volumes: Sequence[Path], *, local_world_size: int, **environment: str
) -> Iterator[list[Rank]]:
    """A job of `len(volumes)` pods with so many ranks each. Skips the test where there is no torch."""
    pytest.importorskip("torch")
    world_size = len(volumes) * local_world_size
    port = free_port()
    ranks: list[Rank] = []
    try:
        for rank in range(world_size):
            volume = volumes[rank // local_world_size]
            place = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank % local_world_size),
                "LOCAL_WORLD_SIZE": str(local_world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "KEEPSTEP_VOLUME": str(volume),
                "OUTPUT": str(volume / "out"),
                "GLOO_SOCKET_IFNAME": "lo",
            }
            ranks.append(Rank(scenario, {**place, **environment}, directory / f"rank-{rank}.log"))
        yield ranks
    except BaseException:
        for started in ranks:
            print(started.log_text())
        raise
    finally:
        for started in ranks:
            started.end()


def notify(rank: Rank) -> None:
    rank.process.send_signal(signal.SIGTERM)
