"""Lives of a program under `keepstep run --autoload`, one after the other, and what it says of itself."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.harness.bounds import HANG_SECONDS

PROGRAM = Path(__file__).with_name("several_trainings.py")
KEEPSTEP = (sys.executable, "-m", "keepstep_agent")


class Lives:
    """Starts a program under `keepstep run` until it has ended by itself; `output` is where it saves."""

    def __init__(self, folder: Path, framework: str, place: str, ranks: int = 1, program: Path = PROGRAM) -> None:
        self._folder = folder
        self._volume = folder / "v"
        self.store = folder / "store"
        # Short names: a socket lies below them.
        places = {"inside": self._volume / "checkpoints", "below": self._volume / "o", "outside": Path("o")}
        # Else a folder from which nothing can be linked into the volume.
        self.output = places.get(place, Path(place))
        launcher: Sequence[str] = (sys.executable,)
        if ranks > 1 or framework == "deepspeed":
            launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        self._words = (*launcher, str(program), framework)
        self.log = ""

    def alone(self, *trainings: str, seen: tuple[str, ...] = ("learned ",)) -> Sequence[str]:
        output = self._folder / "alone"
        ended = self._run((*self._words, str(output), *trainings), {})
        assert ended.returncode == 0, ended.stderr
        return [line for line in ended.stdout.splitlines() if line.startswith(seen)]

    def command(self, *trainings: str) -> str:
        return " ".join((*self._words, str(self.output), *trainings))

    def start(self, command: str, *, restore: str = "whole", **ends: str) -> "subprocess.CompletedProcess[str]":
        places = ("--to", f"file://{self.store}", "--volume", str(self._volume))
        words = (*KEEPSTEP, "run", "--autoload", *places, "--restore", restore, "--", "sh", "-c", command)
        ended = self._run(words, {**ends, "ENDS": str(self._folder)})
        self.log += ended.stdout + ended.stderr
        return ended

    def lose_the_disk(self) -> None:
        shutil.rmtree(self._volume)
        shutil.rmtree(self._folder / "w" / "o", ignore_errors=True)

    def _run(self, words: Sequence[str], variables: dict[str, str]) -> "subprocess.CompletedProcess[str]":
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP_")}
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **variables}
        here = self._folder / "w"
        here.mkdir(exist_ok=True)
        return subprocess.run(
            words, env=environment, cwd=here, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
        )


def resumed(output: str) -> Sequence[str]:
    lines = (line.partition("; passed over")[0] for line in output.splitlines())
    return [line for line in lines if line.startswith("keepstep: resuming from step ")]


def learned(output: str) -> Sequence[str]:
    return [line for line in output.splitlines() if line.startswith("learned ")]
