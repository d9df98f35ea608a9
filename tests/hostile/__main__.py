"""`make hostile`: many hostile objects, requests and volumes, and what came of them. `--help` says how many."""

import argparse
import asyncio
import gc
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import structlog
from tests.harness.agent_process import AgentProcess, write_checkpoint
from tests.hostile import objects, requests, volumes

GROWTH_BYTES: Final = 50 * 1024**2
_WARM_UP: Final = 500

_Result = TypeVar("_Result")


def resident_bytes() -> int:
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def attack_objects(folder: Path, *, rounds: int, seed: int) -> objects.Found:
    """Raises AssertionError for what must not be."""

    def attack(folder: Path, rounds: int) -> objects.Found:
        return asyncio.run(objects.attack(folder, rounds=rounds, seed=seed))

    found = _without_growth(folder, rounds, attack)
    assert found.rounds == rounds
    # The generator does its work: it spoils most of what it touches, and not all.
    assert found.older > rounds / 4
    assert found.newer > 0
    return found


def attack_starts(folder: Path, *, rounds: int, seed: int) -> volumes.Starts:
    """Raises AssertionError for what must not be."""

    def attack(folder: Path, rounds: int) -> volumes.Starts:
        return volumes.attack(folder, rounds=rounds, seed=seed)

    starts = _without_growth(folder, rounds, attack)
    assert starts.rounds == rounds
    # The generator does its work: it spoils many journals, and not all.
    assert starts.moved_aside > rounds / 5
    assert starts.believed > rounds / 5
    return starts


def _without_growth(folder: Path, rounds: int, attack: Callable[[Path, int], _Result]) -> _Result:
    attack(folder / "warm-up", min(_WARM_UP, rounds // 4))
    gc.collect()
    before = resident_bytes()
    # A restore that skips a checkpoint collects garbage. In a process with the objects of thousands of tests that takes
    # a second, which is not the restore's.
    gc.freeze()
    try:
        result = attack(folder / "attack", rounds)
    finally:
        gc.unfreeze()
    gc.collect()
    grown = resident_bytes() - before
    assert grown < GROWTH_BYTES, f"{grown:,} bytes more after {rounds} rounds"
    return result


def attack_agent(folder: Path, *, count: int, seed: int) -> requests.Answers:
    """Raises AssertionError for what must not be."""
    (folder / "destination").mkdir(parents=True)
    with AgentProcess(folder / "volume", f"file://{folder}/destination", watch="off") as agent:
        paths = [write_checkpoint(agent.checkpoints / f"checkpoint-{n}", {"model.bin": 100}) for n in range(3)]
        requests.attack(agent, paths, requests=min(2 * _WARM_UP, count // 4), seed=seed + 1)
        before = agent.memory_bytes("VmHWM")
        answers = requests.attack(agent, paths, requests=count, seed=seed)
        grown = agent.memory_bytes("VmHWM") - before
        assert grown < GROWTH_BYTES, f"{grown:,} bytes more after {count} requests"
        assert not list(requests.lines_of_bugs(agent))
        assert not answers.codes["INTERNAL"], answers
        assert not answers.codes["UNKNOWN"], answers
        assert answers.codes["INVALID_ARGUMENT"] > count / 4
        assert answers.codes["OK"] > 0
        # It serves the next checkpoint as if nothing had been.
        save = agent.announce(write_checkpoint(agent.checkpoints / "checkpoint-9", {"model.bin": 100}), 9).save
        agent.wait_committed(save)
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--objects", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--starts", type=int, default=2_000, help="of agents on hostile files of their own")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    # What restore and the client say of each is not of interest here.
    logging.disable(logging.CRITICAL)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="keepstep-hostile-") as folder:
        print(attack_agent(Path(folder) / "agent", count=arguments.requests, seed=arguments.seed), flush=True)
        print(attack_starts(Path(folder) / "starts", rounds=arguments.starts, seed=arguments.seed), flush=True)
        print(attack_objects(Path(folder) / "objects", rounds=arguments.objects, seed=arguments.seed), flush=True)


if __name__ == "__main__":
    main()
