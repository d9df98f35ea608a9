"""What lazy restore reads and how long it takes, beside a whole restore before the program.

    python -m benchmarks.lazy_restore [--quick]

Eight pods of one rank each, with an agent each, resume a checkpoint that FSDP2 has sharded, from a store that gives all
of them together 200 MB/s. Then one program of one process, behind 100 MB/s, whose libraries take a while to import.
Writes benchmarks/LAZY_RESTORE.md, unless it is --quick, and exits 1 if a goal is missed. Takes ten minutes.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.harness.warm_python import TRAINER_ENVIRONMENT, warm_keepstep
from tests.servers.fault_proxy import FaultProxy
from tests.servers.rclone import RcloneServer
from tests.servers.server import ENVIRONMENT, Bucket, make_bucket
from tests.torch_loop.pods import Pods

REPORT: Final = Path(__file__).with_name("LAZY_RESTORE.md")
_PROGRAM: Final = Path(__file__).with_name("resuming_program.py")
_MEGABYTE: Final = 1_000_000
_POD_RATE: Final = 200 * _MEGABYTE
_LONE_RATE: Final = 100 * _MEGABYTE
_LONGEST_SECONDS: Final = 600.0
_PODS: Final = 8
_FASTER_GOAL: Final = 4.0
_OVERLAP_GOAL: Final = 1.15
_ROUNDS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """How often the checkpoint was read, and seconds from the start of the restore to the last rank's first step."""

    how: str
    saved_by: int
    pods: int
    times_read: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Seconds of one program: to import what it needs, to download, and from its start to its first step."""

    importing: float
    downloading: float
    whole: float
    lazy: float

    @property
    def ratio(self) -> float:
        return self.lazy / max(self.importing, self.downloading)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lazy_restore")
    parser.add_argument("--quick", action="store_true", help="a small model, one round, and no page")
    arguments = parser.parse_args()
    os.environ.update({**ENVIRONMENT, **TRAINER_ENVIRONMENT})
    # Layers and width; in pods each weight has a moment.
    model, lone_model = ((2, 1024), (2, 1024)) if arguments.quick else ((4, 8192), (16, 4096))
    with tempfile.TemporaryDirectory(prefix="keepstep-lazy-") as folder:
        server = RcloneServer(Path(folder) / "served")
        server.start()
        proxy = FaultProxy(server.port)
        proxy.start()
        try:
            jobs = measure_pods(Path(folder), server, proxy, model)
            rounds = 1 if arguments.quick else _ROUNDS
            overlap = measure_overlap(Path(folder), server, proxy, lone_model, rounds=rounds)
        finally:
            proxy.stop()
            server.stop()
    text = page(jobs, overlap, model, lone_model)
    print(text)
    if not arguments.quick:
        REPORT.write_text(text)
    return 0 if all(met for _, _, met in goals(jobs, overlap)) else 1


def measure_pods(folder: Path, server: RcloneServer, proxy: FaultProxy, model: tuple[int, int]) -> list[Resumed]:
    """Save with eight pods and with four, and resume each with as many, and with the other number."""
    found = []
    for saved_by in (_PODS, _PODS // 2):
        bucket = make_bucket(server)
        proxy.throttle(0)
        with pods(folder / f"saved-{saved_by}", saved_by, bucket, proxy, "lazy") as job:
            job.train(*model, 1)
            stored_bytes = job.stored_bytes()
        ways = [("lazy", saved_by), ("lazy", _PODS * _PODS // 2 // saved_by)]
        if saved_by == _PODS:
            ways.insert(0, ("whole", saved_by))
        proxy.throttle(_POD_RATE)
        for how, count in ways:
            found.append(_resumed(folder, bucket, proxy, model, how, saved_by, count, stored_bytes))
            print(found[-1], flush=True)
    proxy.throttle(0)
    return found


def pods(folder: Path, count: int, bucket: Bucket, proxy: FaultProxy, restore: str) -> Pods:
    folder.mkdir()
    return Pods(folder, count, bucket.destination, proxy, program=_PROGRAM, restore=restore, part_size_bytes="8MiB")


def _resumed(
    folder: Path,
    bucket: Bucket,
    proxy: FaultProxy,
    model: tuple[int, int],
    how: str,
    saved_by: int,
    count: int,
    stored_bytes: int,
) -> Resumed:
    place = folder / f"{how}-{saved_by}-{count}"
    job = pods(place, count, bucket, proxy, how)
    proxy.log.clear()
    began_at = time.time()
    if how == "whole":
        _restore_all([pod.volume for pod in job.pods], bucket, proxy)
    with job:
        job.start(*model, 2, "--no-save")
        job.finish()
        first_steps = [float(said) for pod in job.pods for said in pod.says("first step at")]
        read_bytes = job.read_bytes()
    assert len(first_steps) == count
    subprocess.run(["rm", "-rf", str(place)], check=True)
    return Resumed(
        how=how,
        saved_by=saved_by,
        pods=count,
        times_read=read_bytes / stored_bytes,
        seconds=max(first_steps) - began_at,
    )


def _restore_all(volumes: Sequence[Path], bucket: Bucket, proxy: FaultProxy) -> None:
    """What the init containers of all pods do at the same time."""
    running = []
    with Path(os.devnull).open("r+b") as nothing:
        for volume in volumes:
            words = _restore_words(volume, bucket, proxy)
            files = [nothing.fileno(), nothing.fileno(), sys.stderr.fileno()]
            running.append(warm_keepstep().start(words, environment=dict(os.environ), files=files))
    codes = [process.wait(_LONGEST_SECONDS) for process in running]
    assert codes == [0] * len(codes)


def _restore_words(volume: Path, bucket: Bucket, proxy: FaultProxy) -> list[str]:
    words = ["-m", "keepstep_agent", "restore", bucket.destination, f"--volume={volume}"]
    return [*words, f"--endpoint-url={proxy.endpoint_url}", "--watch=off"]


def measure_overlap(
    folder: Path, server: RcloneServer, proxy: FaultProxy, model: tuple[int, int], *, rounds: int
) -> Overlap:
    """One program and its agent, started cold by `keepstep run`; the least of some interleaved rounds."""
    bucket = make_bucket(server)
    _run(folder / "lone-saved", bucket, proxy, model, "lazy")
    proxy.throttle(_LONE_RATE)
    seconds: dict[str, list[float]] = {"importing": [], "downloading": [], "whole": [], "lazy": []}
    for number in range(rounds):
        place = folder / f"lone-{number}"
        # Begins anew, as nothing is restored: what it takes without any download.
        seconds["importing"].append(_run(place / "importing", bucket, proxy, model, "off", saves=False))
        began_at = time.time()
        command = [sys.executable, *_restore_words(place / "downloading", bucket, proxy)]
        subprocess.run(command, capture_output=True, timeout=_LONGEST_SECONDS, check=True)
        seconds["downloading"].append(time.time() - began_at)
        for how in ("whole", "lazy"):
            seconds[how].append(_run(place / how, bucket, proxy, model, how, saves=False))
        subprocess.run(["rm", "-rf", str(place)], check=True)
    proxy.throttle(0)
    print(seconds, flush=True)
    return Overlap(**{what: min(found) for what, found in seconds.items()})


def _run(
    volume: Path, bucket: Bucket, proxy: FaultProxy, model: tuple[int, int], restore: str, *, saves: bool = True
) -> float:
    """Return the seconds to the program's first step."""
    command = [sys.executable, "-m", "keepstep_agent", "run", "--to", bucket.destination, f"--volume={volume}"]
    command += [f"--endpoint-url={proxy.endpoint_url}", "--watch=off", f"--restore={restore}", "--"]
    command += [sys.executable, str(_PROGRAM), *map(str, model), "1", *([] if saves else ["--no-save"])]
    volume.parent.mkdir(parents=True, exist_ok=True)
    began_at = time.time()
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_SECONDS, check=False)
    assert done.returncode in (0, 75), done.stderr
    (first_step_at,) = [line for line in done.stdout.splitlines() if line.startswith("first step at")]
    return float(first_step_at.removeprefix("first step at")) - began_at


def goals(jobs: Sequence[Resumed], overlap: Overlap) -> list[tuple[str, str, bool]]:
    def of(how: str, saved_by: int, count: int) -> Resumed:
        return next(one for one in jobs if (one.how, one.saved_by, one.pods) == (how, saved_by, count))

    half = _PODS // 2
    found = []
    for saved_by, count, most in ((_PODS, _PODS, 1.1), (_PODS, half, 1.5), (half, _PODS, 1.5)):
        read = of("lazy", saved_by, count).times_read
        found.append((f"{saved_by} → {count} pods read ≤ {most} x the checkpoint", f"{read:.2f} x", read <= most))
    faster = of("whole", _PODS, _PODS).seconds / of("lazy", _PODS, _PODS).seconds
    found.append((f"first step ≥ {_FASTER_GOAL:g} x sooner than whole", f"{faster:.1f} x", faster >= _FASTER_GOAL))
    found.append(
        (
            f"one program: start to first step ≤ {_OVERLAP_GOAL:g} x max(import, download)",
            f"{overlap.ratio:.2f} x",
            overlap.ratio <= _OVERLAP_GOAL,
        )
    )
    return found


def page(jobs: Sequence[Resumed], overlap: Overlap, model: tuple[int, int], lone_model: tuple[int, int]) -> str:
    layers, width = model
    gib = 8 * layers * width * width / 1024**3
    lone_gib = 4 * lone_model[0] * lone_model[1] ** 2 / 1024**3
    load = os.getloadavg()[1]
    rows = [
        f"| {one.how} | {one.saved_by} | {one.pods} | {one.times_read:.2f} x | {one.seconds:.1f} s |" for one in jobs
    ]
    goal_rows = [f"| {goal} | {measured} | {'yes' if met else 'no'} |" for goal, measured, met in goals(jobs, overlap)]
    about = textwrap.fill(
        "Pods of one rank each, whose programs are forked from a Python that has imported torch: all of them share "
        f"{os.cpu_count()} cores ({platform.machine()}), and each of real ones has its own. The checkpoint has "
        f"{gib:.1f} GiB in parts of 8 MiB, sharded by FSDP2. The store gives all pods together "
        f"{_POD_RATE / _MEGABYTE:.0f} MB/s. Seconds count from the start of the restore to the first step of the last "
        f"rank. At the end the machine had {load:.1f} processes to run.",
        width=118,
    )
    lone = textwrap.fill(
        f"`keepstep run` with one process that imports torch, behind {_LONE_RATE / _MEGABYTE:.0f} MB/s; the checkpoint "
        f"has {lone_gib:.1f} GiB in {lone_model[0]} tensors. Importing is the time to the first step without restore; "
        "downloading is that of `keepstep restore`. All start cold. The least of interleaved rounds.",
        width=118,
    )
    return "\n".join(
        [
            "# What lazy restore reads, and how long it takes",
            "",
            "Made by `python -m benchmarks.lazy_restore`; do not edit.",
            "",
            about,
            "",
            "| restore | saved by | resumed by | read | first step |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "## One program",
            "",
            lone,
            "",
            "| importing | downloading | whole | lazy |",
            "|---|---|---|---|",
            "| "
            + " | ".join(
                f"{seconds:.1f} s" for seconds in (overlap.importing, overlap.downloading, overlap.whole, overlap.lazy)
            )
            + " |",
            "",
            "| goal | measured | met |",
            "|---|---|---|",
            *goal_rows,
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
