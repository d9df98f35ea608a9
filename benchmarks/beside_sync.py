"""What comes back after a kill at a random moment: Keepstep's snapshots beside a loop of `rclone sync` or `s5cmd sync`.

    python -m benchmarks.beside_sync [--kills 200] [--interval 2] [--at-once 10] [--quick]

`benchmarks.saving_program` writes a checkpoint of four files in place every few seconds. At a random moment SIGKILL
kills it, its disk is lost, the bucket is restored to an empty directory, and the program's own check loads the
checkpoint. *Torn* is one that does not load, or is a mix of two saves. The next life goes on from there. Each
contestant has as many kills, on the same server of rclone on loopback, and many lives run at once. Writes
benchmarks/BESIDE_SYNC.md, unless it is --quick, and exits 1 if anything of Keepstep's is torn. Takes six minutes.
"""

import argparse
import itertools
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.saving_program import CHECKPOINT_BYTES, TornError, load
from benchmarks.sync_contestants import Bench, Contestant, Life, Loop, MachineKilled, ProgramKilled, loops
from tests.harness.warm_python import warm_keepstep
from tests.servers.fault_proxy import FaultProxy
from tests.servers.rclone import RcloneServer

REPORT: Final = Path(__file__).with_name("BESIDE_SYNC.md")
QUICK_KILLS: Final = 40
MOST_ROWS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A life lasts as long as chance has it, between `shortest_seconds` and `longest_seconds`."""

    kills: int = 200
    at_once: int = 10
    write_seconds: float = 1.5
    train_seconds: float = 6.0
    sync_interval_seconds: float = 2.0
    shortest_seconds: float = 6.0
    longest_seconds: float = 26.0


FULL: Final = Scenario()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one kill left. `torn`: why it is, else empty. `lost`: saves that were complete and did not come back."""

    torn: str
    saved: int
    lost: int
    restored: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    contestant: str
    outcomes: Sequence[Outcome]
    sent_bytes: int

    @property
    def torn(self) -> list[Outcome]:
        return [one for one in self.outcomes if one.torn]

    @property
    def is_keepsteps(self) -> bool:
        return self.contestant.startswith("Keepstep")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside_sync")
    parser.add_argument("--kills", type=int, default=FULL.kills, help="of each contestant")
    parser.add_argument("--interval", type=float, default=FULL.sync_interval_seconds, help="s between two syncs")
    parser.add_argument("--at-once", type=int, default=FULL.at_once, help="lives of each contestant at a time")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_KILLS} kills, and no page")
    arguments = parser.parse_args()
    scenario = Scenario(
        kills=QUICK_KILLS if arguments.quick else arguments.kills,
        at_once=arguments.at_once,
        sync_interval_seconds=arguments.interval,
    )
    with tempfile.TemporaryDirectory(prefix="beside-") as folder:
        results = compare(Path(folder), scenario, loops(scenario.sync_interval_seconds))
    text = page(results, scenario)
    print(text)
    if not arguments.quick:
        REPORT.write_text(text)
    return 0 if not any(result.torn for result in results if result.is_keepsteps) else 1


def compare(folder: Path, scenario: Scenario, rivals: Sequence[Loop]) -> list[Result]:
    """All contestants at the same time."""
    contestants: list[Contestant] = [MachineKilled(), ProgramKilled(), *rivals]
    server = RcloneServer(folder / "data")
    server.start()
    try:
        proxy = FaultProxy(server.port)
        proxy.start()
        warm_keepstep()  # before there are threads, each of which would start one
        bench = Bench(folder=folder, server=server, proxy=proxy)
        with ThreadPoolExecutor(len(contestants)) as threads:
            return list(threads.map(lambda contestant: _all_lives(contestant, bench, scenario), contestants))
    finally:
        server.stop()


def _all_lives(contestant: Contestant, bench: Bench, scenario: Scenario) -> Result:
    chains = [scenario.kills // scenario.at_once] * scenario.at_once
    for number in range(scenario.kills % scenario.at_once):
        chains[number] += 1
    with ThreadPoolExecutor(scenario.at_once) as threads:
        ended = list(
            threads.map(
                lambda number: _chain(contestant, bench, scenario, number, chains[number]), range(scenario.at_once)
            )
        )
    outcomes = [outcome for chain, _ in ended for outcome in chain]
    buckets = {bucket for _, used in ended for bucket in used}
    return Result(contestant=contestant.name, outcomes=outcomes, sent_bytes=bench.sent_bytes(buckets))


def _chain(
    contestant: Contestant, bench: Bench, scenario: Scenario, number: int, kills: int
) -> tuple[list[Outcome], list[str]]:
    """Lives that go on from each other; return their outcomes, and the buckets that they used."""
    chance = random.Random(f"{contestant.name} {number}")
    outcomes: list[Outcome] = []
    buckets: list[str] = []
    lives = itertools.count()
    life: Life | None = None
    while len(outcomes) < kills:
        if life is None:
            life = bench.life(contestant.label, number, next(lives))
            buckets.append(life.bucket.name)
        seconds = chance.uniform(scenario.shortest_seconds, scenario.longest_seconds)
        with contestant.begun(life, scenario.write_seconds, scenario.train_seconds) as kill:
            time.sleep(seconds)
            kill()
        saved, logs = life.last_saved(), life.logs()
        shutil.rmtree(life.folder)
        life = bench.life(contestant.label, number, next(lives), bucket=life.bucket)
        contestant.restore(life)
        outcome = _outcome(life, saved)
        outcomes.append(outcome)
        print(f"{contestant.name} {number}: {outcome}", file=sys.stderr, flush=True)
        if outcome.torn:
            print(logs, file=sys.stderr, flush=True)
            # No program goes on from that.
            shutil.rmtree(life.folder)
            life = None
    if life is not None:
        shutil.rmtree(life.folder)
    return outcomes, buckets


def _outcome(life: Life, saved: int) -> Outcome:
    try:
        restored = load(life.output)
    except TornError as error:
        return Outcome(torn=str(error), saved=saved, lost=0, restored=0)
    return Outcome(torn="", saved=saved, lost=max(0, saved - restored), restored=restored)


def page(results: Sequence[Result], scenario: Scenario) -> str:
    lines = [
        "# Beside a loop that syncs",
        "",
        "Made by `make bench` (`benchmarks/beside_sync.py`); do not edit.",
        "",
        *_what_was_measured(scenario),
        "",
        "| kept by | kills | torn | nothing stored yet | saves lost: median, most | MB sent per life |",
        "|---|---|---|---|---|---|",
        *map(_row, results),
        "",
        "Saves lost: how many complete saves were newer than the one that came back. A sync each few seconds stores",
        "newer ones than a snapshot does, which waits for two quiet seconds and comes at most every ten.",
        "",
        *_reasons(results),
        "| goal | measured | met |",
        "|---|---|---|",
        *(
            f"| {result.contestant}: torn = 0 | {len(result.torn)} | {'yes' if not result.torn else 'no'} |"
            for result in results
            if result.is_keepsteps
        ),
    ]
    return "\n".join(lines) + "\n"


def _what_was_measured(scenario: Scenario) -> list[str]:
    text = (
        f"A program trains for {scenario.train_seconds:g} s, then writes {CHECKPOINT_BYTES / 1e6:.1f} MB in four files "
        f"in place within {scenario.write_seconds:g} s, and so on. SIGKILL kills it after "
        f"{scenario.shortest_seconds:g} to {scenario.longest_seconds:g} s, its disk is lost, and the bucket is "
        "restored. Torn: what comes back does not load, or is a mix of two saves. The loops sync, then sleep for "
        f"{scenario.sync_interval_seconds:g} s. Where the machine is killed, the agent dies at the same moment as the "
        "program, and so does each loop. Where the program is killed, `keepstep run` lives on and ends by itself. "
        f"{scenario.at_once} lives of each at a time, all against `rclone serve s3` on loopback; {os.cpu_count()} "
        f"cores ({platform.machine()}), and at the end {os.getloadavg()[1]:.1f} processes to run."
    )
    return textwrap.wrap(text, 118)


def _row(result: Result) -> str:
    whole = [one for one in result.outcomes if not one.torn]
    nothing = sum(one.restored == 0 for one in whole)
    lost = [one.lost for one in whole] or [0]
    sent = result.sent_bytes / len(result.outcomes) / 1e6
    return (
        f"| {result.contestant} | {len(result.outcomes)} | {len(result.torn)} | {nothing} "
        f"| {statistics.median(lost):g}, {max(lost)} | {sent:.1f} |"
    )


def _reasons(results: Sequence[Result]) -> list[str]:
    """Some of what was found torn, for the reader to judge."""
    lines = []
    for result in results:
        if result.torn:
            lines += [f"Torn with {result.contestant}, for example:", ""]
            lines += [f"- {reason}" for reason in sorted({one.torn for one in result.torn})[:MOST_ROWS]]
            lines += [""]
    return lines


if __name__ == "__main__":
    sys.exit(main())
