"""`make soak`: every trainer, every notice, every moment, many times; a line for each combination. For people, not CI.

python -m tests.trainers.soak --times 20 --trainer ddp --trainer fsdp2

`--matrix`: only the stops that the matrix makes once, each trainer and notice at one moment.
"""

import argparse
import itertools
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from tests.harness.warm_python import TRAINER_ENVIRONMENT
from tests.servers.rclone import RcloneServer
from tests.servers.server import ENVIRONMENT, make_bucket
from tests.trainers.chain import Chain
from tests.trainers.trainers import STEPS, TRAINERS, Moment, Notice, Stop, Trainer

_AFTER = 3


def main() -> int:
    parser = argparse.ArgumentParser(description="Stop every trainer in every way, many times.")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--trainer", action="append", choices=[trainer.name for trainer in TRAINERS])
    parser.add_argument("--matrix", action="store_true")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT, **TRAINER_ENVIRONMENT, GRPC_ENABLE_FORK_SUPPORT="0")
    failures = 0
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        server = RcloneServer(Path(folder) / "data")
        server.start()
        try:
            for trainer in TRAINERS:
                if arguments.trainer is None or trainer.name in arguments.trainer:
                    for stop in trainer.stops if arguments.matrix else combinations(trainer):
                        failures += _repeat(trainer, stop, server, Path(folder), arguments.times)
        finally:
            server.stop()
    return 1 if failures else 0


def combinations(trainer: Trainer) -> Iterator[Stop]:
    for notice, moment in itertools.product(trainer.notices, Moment):
        if moment is not Moment.EVALUATION or trainer.evaluates:
            yield Stop(notice=notice, moment=moment, after=_AFTER)
    for notice in trainer.notices:
        yield Stop(notice=notice, moment=Moment.BACKWARD, after=0)  # the warm-up
        # torchrun itself is not told twice: it would leave its ranks alone.
        if notice is not Notice.LAUNCHER:
            yield Stop(notice=notice, moment=Moment.STEP, after=_AFTER, twice=True)
        yield Stop(notice=notice, moment=Moment.STEP, after=_AFTER, autoload=True)


def _repeat(trainer: Trainer, stop: Stop, server: RcloneServer, folder: Path, times: int) -> int:
    """How often it failed; each time it resumes from the bucket, and begins afresh where few steps are left."""
    failures, began = 0, time.monotonic()
    chain: Chain | None = None
    for number in range(times):
        if chain is None or chain.step > STEPS // 2:
            place = Path(tempfile.mkdtemp(dir=folder))
            chain = Chain(trainer, make_bucket(server), place)
        try:
            chain.stop(stop)
        except Exception:
            failures += 1
            chain = None
            print(f"--- {trainer.name}: {stop}, time {number + 1}\n{traceback.format_exc()}", flush=True)
    seconds = (time.monotonic() - began) / times
    print(f"{trainer.name:20} {stop!s:50} {times - failures:3} of {times} held, {seconds:.1f} s each", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())
