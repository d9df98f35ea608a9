"""Two ranks under torchrun that leave after a just-in-time save, the last one while torchrun ends what is left.

torchrun … tests/client/ranks/lingering.py <checkpointer or framework>

Rank 1's process stays until torchrun's SIGTERM has reached its process group, and says what became of a program that it
started there.
"""

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import torch.distributed as distributed

import keepstep
from keepstep.framework_run import FrameworkRun
from keepstep.gate import Action

RANK = int(os.environ["RANK"])
WAIT_SECONDS = "300"


def linger() -> None:
    # When nothing ends it, its exit code is another.
    started = subprocess.run(["sleep", WAIT_SECONDS])
    print("started", started.returncode, flush=True)


def steps() -> Iterator[int]:
    for step in range(1, 10_000):
        distributed.barrier()
        if step == 3 and RANK == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        yield step


def checkpointer() -> None:
    saver = keepstep.Checkpointer()
    for step in steps():
        if saver.should_save(step, every=0):
            with saver.save(step) as directory:
                (directory / f"rank-{RANK}").touch()
        if saver.stopping:
            saver.finish()


def framework() -> None:
    run = FrameworkRun.current()
    for step in steps():
        if run.action_at(step) is Action.SAVE_AND_EXIT:
            path = run.checkpoint_directory / f"checkpoint-{step}"
            path.mkdir(exist_ok=True)
            (path / f"rank-{RANK}").touch()
            run.announce_written(path, step)
            run.leave()


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    if RANK == 1:
        atexit.register(linger)
    {"checkpointer": checkpointer, "framework": framework}[sys.argv[1]]()
