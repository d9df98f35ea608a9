"""How long a just-in-time checkpoint takes to be durable when older ones wait for the wire, or have it.

    python -m benchmarks.just_in_time [--rounds 5] [--rate 400] [--scale 1.0]

A trainer has saved two checkpoints of 2 GiB, and the first has just begun to go to a store of limited rate, when the
machine is told to end: SIGTERM, and the checkpoint that the trainer saves then, 2 GiB too, is there at once. The clock
runs from SIGTERM until the store has its commit marker. Keepstep's real agent, an uploader that takes the oldest first,
and one that takes the newest first but finishes what it has begun, have the same files, part size and number of
connections, in turn. Writes benchmarks/JUST_IN_TIME.md and the plot beside it, and exits 1 if the goal is missed. Five
rounds take five minutes. Needs 6 GiB of free disk below the temporary directory, and as much page cache.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.data_path.build import build
from benchmarks.data_path.certificate import make_certificate
from benchmarks.data_path.server import Server
from benchmarks.just_in_time_report import REPORT, Contestant, Scenario, Store, is_met, page, plot
from benchmarks.plain_uploader import MARKER
from tests.harness.agent_process import AgentProcess, wait_until, write_checkpoint
from tests.harness.trainer_process import TrainerProcess
from tests.servers.server import ENVIRONMENT

from keepstep_agent.core.settings.values import MIB
from keepstep_agent.core.stored.object_layout import step_prefix
from keepstep_agent.core.stored.packs_and_parts import MIN_PART_BYTES
from keepstep_api.v1 import agent_pb2

CONNECTIONS: Final = 8
PART_BYTES: Final = 32 * MIB
CHECKPOINT_BYTES: Final = 2048 * MIB
BACKLOG: Final = 2
FILES: Final = 4
LONGEST_SECONDS: Final = 600.0


class ThrottledStore:
    """The C store at a limited rate, as one run sees it: everything lies below a prefix of its own."""

    def __init__(self, server: Server, prefix: str, bytes_per_second: int) -> None:
        server.limit(bytes_per_second)
        server.reset()
        self._server = server
        self.prefix = prefix
        self.endpoint_url = server.endpoint_url(secure=False)

    def wait_received(self, size_bytes: int) -> None:
        wait_until(lambda: self._server.counts().bytes_in >= size_bytes, LONGEST_SECONDS, "the first is being sent")

    def wait_stored(self, key: str) -> float:
        """When (time.monotonic()) the object was there; `key` is relative to the prefix."""
        full_key = f"{self.prefix}/{key}"
        wait_until(lambda: full_key in self._server.sizes(full_key), LONGEST_SECONDS, f"{full_key} is stored")
        return time.monotonic()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.just_in_time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=int, default=400, help="of the store, MB/s")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of checkpoints and parts: 0.05 for a look at it, and no page"
    )
    arguments = parser.parse_args()
    scenario = Scenario(
        rate=arguments.rate * 1_000_000,
        file_bytes=int(CHECKPOINT_BYTES * arguments.scale) // FILES,
        files=FILES,
        backlog=BACKLOG,
        part_bytes=max(MIN_PART_BYTES, int(PART_BYTES * arguments.scale)),
        connections=CONNECTIONS,
    )
    contestants = [
        Contestant("Keepstep", keepstep),
        Contestant("newest first, not preemptive", lambda *run: plain_uploader("lifo", *run)),
        Contestant("oldest first", lambda *run: plain_uploader("fifo", *run)),
    ]
    with tempfile.TemporaryDirectory(prefix="keepstep-just-in-time-") as name:
        folder = Path(name)
        sources = [folder / f"checkpoint-{step}" for step in range(1, BACKLOG + 2)]
        for source in sources:
            write_checkpoint(source, {f"shard-{file}.bin": scenario.file_bytes for file in range(FILES)})
        server = Server(
            build(folder).server,
            sources=folder / "none",
            spool=folder / "spool",
            certificate=make_certificate(folder / "tls"),
        )
        with server:
            for number in range(arguments.rounds):
                for place, contestant in enumerate(contestants):
                    prefix = f"run-{number}-{place}"
                    checkpoints = linked(sources, folder / prefix / "checkpoints")
                    os.sync()  # or the disk is busy with what was written before
                    store = ThrottledStore(server, prefix, scenario.rate)
                    signalled_at, durable_at = contestant.run(scenario, store, checkpoints)
                    contestant.seconds.append(durable_at - signalled_at)
                    print(f"{contestant.name}: {contestant.seconds[-1]:.2f} s", file=sys.stderr, flush=True)
    text = page(contestants, scenario, rounds=arguments.rounds)
    print(text)
    if arguments.scale == 1:
        REPORT.write_text(text)
        plot(contestants, scenario)
    return 0 if is_met(contestants, scenario) else 1


def linked(sources: Sequence[Path], folder: Path) -> list[Path]:
    """The same files in directories of its own."""
    directories = [folder / source.name for source in sources]
    for source, directory in zip(sources, directories, strict=True):
        directory.mkdir(parents=True)
        for file in source.iterdir():
            os.link(file, directory / file.name)
    return directories


def keepstep(scenario: Scenario, store: Store, checkpoints: Sequence[Path]) -> tuple[float, float]:
    """(when SIGTERM was sent, when the last checkpoint was durable)."""
    volume = checkpoints[0].parents[1]
    agent = AgentProcess(
        volume,
        f"s3://bench/{store.prefix}",
        environment=ENVIRONMENT,
        endpoint_url=store.endpoint_url,
        part_size_bytes=scenario.part_bytes,
        max_concurrency=scenario.connections,
        grace_seconds=LONGEST_SECONDS,
        watch="off",
    )
    with agent, TrainerProcess(volume):
        for step, directory in enumerate(checkpoints[:-1], start=1):
            agent.announce(directory, step)
            if step == 1:
                store.wait_received(scenario.window_bytes)
        signalled_at = time.monotonic()
        agent.terminate()
        step = len(checkpoints)
        save = agent.announce(checkpoints[-1], step, kind=agent_pb2.KIND_JUST_IN_TIME).save
        return signalled_at, store.wait_stored(f"{step_prefix(step)}{save}.json")


def plain_uploader(order: str, scenario: Scenario, store: Store, checkpoints: Sequence[Path]) -> tuple[float, float]:
    """The same of `benchmarks.plain_uploader`. It is sent no signal: its trainer tells it of the last checkpoint."""
    command = [sys.executable, "-m", "benchmarks.plain_uploader", order, store.endpoint_url, store.prefix]
    command += [str(scenario.part_bytes), str(scenario.connections)]
    environment = {**os.environ, **ENVIRONMENT}
    uploader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert uploader.stdin is not None
        assert uploader.stdout is not None
        assert uploader.stdout.readline() == "ready\n"
        signalled_at = 0.0
        for step, directory in enumerate(checkpoints, start=1):
            signalled_at = time.monotonic()
            uploader.stdin.write(f"{directory}\n")
            uploader.stdin.flush()
            if step == 1:
                store.wait_received(scenario.window_bytes)
        return signalled_at, store.wait_stored(f"{checkpoints[-1].name}/{MARKER}")
    finally:
        uploader.kill()
        uploader.communicate()


if __name__ == "__main__":
    sys.exit(main())
