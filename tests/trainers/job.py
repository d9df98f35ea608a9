"""A real training job under a test's control: torchrun, ranks, DataLoader workers and the pace they keep.

Nothing waits without a bound, and nothing that the job started is there when its context is left.
"""

import contextlib
import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.warm_python import WarmProcess, starts_alike, warm_torchrun
from tests.servers.process import free_port

from keepstep.autoload import path as autoload_path
from keepstep_api import names

PACED: Final = Path(__file__).with_name("paced.py")
# It bounds a hang and judges no speed: two ranks import a framework each, on a machine that others load.
START_SECONDS: Final = 400.0
_STACK_SECONDS: Final = 5.0
_STILL_SECONDS: Final = 0.3
LIBRARIES: Final = {
    "accelerate_loop": "accelerate",
    "deepspeed_zero3": "deepspeed",
    "hugging_face": "transformers.trainer",
    "lightning_trainer": "lightning.pytorch",
    "trl_sft": "trl.trainer.sft_trainer",
}
"""What takes an example seconds to import. Under autoload it does so itself, as all its hooks must find that."""
_FAST_SECONDS: Final = 0.03
SLOW_SECONDS: Final = 60.0
"""A step after the notice at the longest: it is over when the ranks have agreed, as it is in real trainings."""
# Not by the line: Python's print is two writes, and what torch writes to stderr may come before the line's end.
_LOSS: Final = re.compile(r"step=(\d+) loss=(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?|nan|inf)")


class Job:
    """`begin` is the step that it resumes at. `launcher`: torchrun's arguments, by default for one node of `ranks`.

    `patient`: it waits longer for its agent than Keepstep's client does, which takes a minute of a busy machine for an
    agent that is away.
    """

    def __init__(
        self,
        program: Path,
        arguments: Sequence[str] = (),
        *,
        volume: Path,
        folder: Path,
        begin: int = 0,
        ranks: int = 2,
        launcher: Sequence[str] | None = None,
        autoload: bool = False,
        without_keepstep: bool = False,
        patient: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True)
        self.ranks = ranks
        self._folder = folder
        self._output = folder / "output.log"
        self._library = LIBRARIES.get(program.stem, "torchdata.stateful_dataloader")
        self._words = [f"--nproc-per-node={ranks}", f"--log-dir={folder / 'torchrun'}"]
        self._words += launcher if launcher is not None else one_node()
        self._words += [str(PACED), str(program), *arguments]
        self._environment = {
            **os.environ,
            names.ENV_VOLUME: str(volume),
            names.ENV_CHECKPOINT_DIRECTORY: str(volume / names.CHECKPOINT_DIRECTORY),
            "PACE_DIRECTORY": str(folder),
            "PACE_BEGIN": str(begin),
            "GLOO_SOCKET_IFNAME": "lo",
            # As the injection sets it from the grace period.
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(HANG_SECONDS)),
            **(environment or {}),
        }
        if autoload:
            found = [str(autoload_path()), *filter(None, [os.environ.get("PYTHONPATH")])]
            self._environment["PYTHONPATH"] = os.pathsep.join(found)
        if patient:
            self._environment["PACE_PATIENT"] = "1"
        if without_keepstep:
            self._environment["PACE_WITHOUT_KEEPSTEP"] = "1"
        self._process: subprocess.Popen[bytes] | WarmProcess | None = None
        self.order()

    def __enter__(self) -> Self:
        with self._output.open("wb") as out, Path(os.devnull).open("rb") as nothing:
            if starts_alike(self._environment):
                words = ["-m", "tests.harness.warm_torchrun", *self._words]
                warm = warm_torchrun(self._library)
                files = [nothing.fileno(), out.fileno(), out.fileno()]
                self._process = warm.start(words, environment=self._environment, files=files, directory=self._folder)
            else:
                command = [sys.executable, "-m", "torch.distributed.run", *self._words]
                self._process = subprocess.Popen(
                    command, env=self._environment, cwd=self._folder, stdin=nothing, stdout=out, stderr=out
                )
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def process(self) -> "subprocess.Popen[bytes] | WarmProcess":
        assert self._process is not None, "not started"
        return self._process

    def order(self, *, hold: str = "", at_step: int = 0, step_seconds: float = _FAST_SECONDS) -> None:
        """What every rank does from now on: go on, or wait at a place of `paced.py` after `at_step` steps."""
        orders = self._folder / "orders.json"
        written = orders.with_suffix(".tmp")
        written.write_text(json.dumps({"hold": hold, "at_step": at_step, "step_seconds": step_seconds}))
        written.replace(orders)

    def wait_held(self, place: str, *, ranks: int | None = None, step: int = 0) -> None:
        """Until so many ranks, or all, are held there, after `step` or a later one."""
        count = self.ranks if ranks is None else ranks

        def held() -> bool:
            return sum(where == place and at >= step for where, at in self._held()) >= count

        self.wait_for(held, f"{count} ranks are held: {place}")

    def wait_steps(self, step: int) -> None:
        """Until all ranks have done that step."""
        self.wait_for(lambda: all(done >= step for done in self.last_steps()), f"all ranks did step {step}")

    def wait_still(self) -> None:
        """Until no rank has ended a step for a moment, less than a slow one takes."""
        seen, since = self.last_steps(), time.monotonic()

        def still() -> bool:
            nonlocal seen, since
            now = self.last_steps()
            if now != seen:
                seen, since = now, time.monotonic()
            return time.monotonic() - since >= _STILL_SECONDS

        self.wait_for(still, "a step in flight is done")

    def wait_for(self, holds: Callable[[], bool], what: str) -> None:
        """While the job runs."""

        def settled() -> bool:
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.output()}"
            return holds()

        try:
            wait_until(settled, START_SECONDS, what)
        except AssertionError as error:
            raise self._stuck(error) from error

    def last_steps(self, restart: int | None = None) -> list[int]:
        """The last step that each rank has done, in this restart or the newest; -1 before its first."""
        return [self._progress(rank, restart)[1] for rank in self._present_ranks()] or [-1]

    def longest_step_seconds(self) -> float:
        """Between the ends of two steps of one rank; what hinders training is in there."""
        times = [
            [float(line.split()[1]) for line in path.read_text().splitlines()[1:]]
            for path in self._folder.glob("rank-*.log")
        ]
        return max(after - before for one in times for before, after in itertools.pairwise(one))

    def pid(self, rank: int) -> int:
        return self._progress(rank, None)[0]

    def restarts(self) -> int:
        """How often all its ranks were started again."""
        return max((int(path.suffixes[0][1:]) for path in self._folder.glob("rank-*.log")), default=0)

    def signal(self, rank: int | None, number: signal.Signals = signal.SIGTERM) -> None:
        """To one rank alone; None: to torchrun, which passes SIGTERM on to all of them."""
        os.kill(self.process.pid if rank is None else self.pid(rank), number)

    def wait(self, timeout_seconds: float = START_SECONDS + HANG_SECONDS) -> int:
        """Its exit code, once nothing of it is left."""
        try:
            code = self.process.wait(timeout_seconds)
            wait_until(lambda: not self.processes(), timeout_seconds, "nothing of the job is left")
        except (subprocess.TimeoutExpired, AssertionError) as error:
            raise self._stuck(error) from error
        return code

    def _stuck(self, error: Exception) -> AssertionError:
        """With the stacks of the ranks that are there, and of the workers that they have forked."""
        for pid in self.processes():
            if _catches(pid, signal.SIGUSR2):
                said = len(self.output())
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR2)
                with contextlib.suppress(AssertionError):
                    wait_until(functools.partial(self._said_more, said), _STACK_SECONDS, "it says where it is")
        return AssertionError(f"{error}; at steps {self.last_steps()}\n{self.output()}")

    def _said_more(self, than: int) -> bool:
        return len(self.output()) > than

    def processes(self) -> list[int]:
        """All that runs in its folder: torchrun, ranks, DataLoader workers, writers."""
        found = []
        for entry in Path("/proc").iterdir():
            # It is gone, or somebody else's.
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and (entry / "cwd").samefile(self._folder):
                    found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """SIGKILL to everything of it, and wait for the end; idempotent."""

        def gone() -> bool:
            left = self.processes()
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            return not left and self.process.poll() is not None

        wait_until(gone, HANG_SECONDS, "what the job started is gone")

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def losses(self) -> dict[int, str]:
        """step -> loss, as rank 0 printed them."""
        return {int(step): loss for step, loss in _LOSS.findall(self.output())}

    def warnings(self, text: str) -> list[str]:
        """The lines of its output that contain it."""
        return [line for line in self.output().splitlines() if text in line]

    def _held(self) -> list[tuple[str, int]]:
        """Where each rank that is held is: the place, and the steps it has done."""
        found = []
        for path in self._folder.glob("held-*"):
            try:
                place, step = path.read_text().split()
            except (FileNotFoundError, ValueError):
                continue  # it goes on just now, or comes
            found.append((place, int(step)))
        return found

    def _present_ranks(self) -> list[int]:
        return sorted({int(path.name.removeprefix("rank-").split(".")[0]) for path in self._folder.glob("rank-*.log")})

    def _progress(self, rank: int, restart: int | None) -> tuple[int, int]:
        """(pid, last step)."""
        number = self.restarts() if restart is None else restart
        path = self._folder / f"rank-{rank}.{number}.log"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        words = [line.split() for line in lines if line.endswith("\n")]
        pid = int(words[0][1]) if words else 0
        return pid, int(words[-1][0]) if len(words) > 1 else -1


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler of that signal, which would end it otherwise."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
    return False


def one_node() -> list[str]:
    return ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
