"""Two ranks, which the program forks, write their files into one directory. Each needs its own to resume."""

import multiprocessing
import sys
from multiprocessing.synchronize import Barrier
from pathlib import Path

from tests.harness.bounds import HANG_SECONDS
from tests.programs.training import Loaded, State, as_zip, done, from_zip, newest, number_in, run, work, write

RANKS = 2
# The second rank begins to write when the first is done, as one with more to gather does.
LATER = 8


def main(rank: int, barrier: Barrier) -> None:
    def load(output: Path) -> Loaded | None:
        path = newest(output, "step-*")
        loaded = from_zip((path / f"rank{rank}.pt").read_bytes()) if path else None
        assert path is None or (loaded and loaded[0] == number_in(path)), "it is of another step"
        barrier.wait(HANG_SECONDS)
        return loaded

    def save(output: Path, step: int, state: State) -> None:
        for _ in range(LATER * rank):
            work("WRITE_SECONDS")
        write(output / f"step-{step}" / f"rank{rank}.pt", as_zip(step, state))
        barrier.wait(HANG_SECONDS)

    final = run(load, save, say=print if rank == 0 else lambda *_, **__: None)
    if rank == 0:
        done(final)


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    together = context.Barrier(RANKS)
    ranks = [context.Process(target=main, args=(rank, together), daemon=True) for rank in range(RANKS)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    sys.exit(max(one.exitcode or 0 for one in ranks))
