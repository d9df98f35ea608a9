"""How much memory an agent and restore need for the files of a checkpoint: of 1,000 to 100,000 small ones.

    python -m benchmarks.many_files

Real agents and restores with an S3 server on loopback. A rank announces the checkpoint, or the agent finds it in an
output directory; another agent takes up the journal; both are restored. Each peak is the kernel's (VmHWM), less
what the same process takes for a checkpoint of one file. Writes benchmarks/MANY_FILES.md, and exits 1 if a goal is
missed.
"""

import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

from tests.harness.agent_process import AgentProcess, wait_until
from tests.servers.rclone import RcloneServer
from tests.servers.server import ENVIRONMENT, Bucket, make_bucket

from keepstep_api.v1 import agent_pb2

COUNTS: Final = (1_000, 10_000, 50_000, 100_000)
SHAPES: Final = (*((count, 1_000) for count in COUNTS), (COUNTS[-1], COUNTS[-1]))
"""How many files, and how many of them in a folder."""
MOST_MIB: Final = 256.0
"""What the injection gives an agent."""
MOST_KIB: Final = {"announced": 0.75, "restarted": 0.6, "restored": 0.5, "watched": 1.6, "put_back": 1.6}
"""For each of 100,000 files, a tenth above what was measured: docs/design/0012-doors.md says why not half of one."""
REPORT: Final = Path(__file__).with_name("MANY_FILES.md")
_LONGEST_SECONDS: Final = 900.0
_RESTORE: Final = """
import resource, sys
from keepstep_agent.__main__ import main
try:
    main()
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The most memory that each process ever had, in MiB."""

    announced: float
    restarted: float
    restored: float
    watched: float
    put_back: float


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="keepstep-many-files-") as directory:
        server = RcloneServer(Path(directory) / "data")
        server.start()
        try:
            bucket = make_bucket(server)
            peaks = {shape: measure(Path(directory), bucket, *shape) for shape in ((1, 1), *SHAPES)}
        finally:
            server.stop()
    text = report(peaks)
    REPORT.write_text(text)
    print(text)
    is_over = any(max(astuple(one)) > MOST_MIB for one in peaks.values())
    for name, most in MOST_KIB.items():
        is_over |= any(
            per_file_kib(peaks, name, count, folder) > most for count, folder in SHAPES if count == COUNTS[-1]
        )
    return int(is_over)


def per_file_kib(peaks: dict[tuple[int, int], Peaks], name: str, count: int, folder_files: int) -> float:
    """Memory for each file, beyond what one file takes."""
    more_mib: float = getattr(peaks[count, folder_files], name) - getattr(peaks[1, 1], name)
    return more_mib * 1024 / count


def measure(directory: Path, bucket: Bucket, count: int, folder_files: int) -> Peaks:
    run = f"{count}-{folder_files}"
    (folder := directory / run).mkdir()
    announced, restarted = store_announced(folder / "announced", bucket, run, count, folder_files)
    return Peaks(
        announced=announced,
        restarted=restarted,
        restored=restore(folder / "restored", bucket, f"announced-{run}"),
        watched=store_watched(folder / "watched", bucket, run, count, folder_files),
        put_back=restore(folder / "back", bucket, f"watched-{run}", f"--watch={folder}/back/out"),
    )


def store_announced(volume: Path, bucket: Bucket, run: str, count: int, folder_files: int) -> tuple[float, float]:
    agent = agent_of(volume, bucket, f"announced-{run}", watch="off")
    write_files(agent.checkpoints / "checkpoint-1", count, folder_files)
    agent.start()
    try:
        request = agent_pb2.AnnounceCheckpointRequest(path=str(agent.checkpoints / "checkpoint-1"), step=1)
        with agent.stub() as stub:
            save = stub.AnnounceCheckpoint(request, timeout=_LONGEST_SECONDS).save
        agent.wait_committed(save, _LONGEST_SECONDS)
        announced = peak_mib(agent)
        agent.kill()
        agent.start()
        wait_until(lambda: agent.status().newest_committed.save == save, _LONGEST_SECONDS, "it is known again")
        return announced, peak_mib(agent)
    finally:
        agent.kill()


def store_watched(volume: Path, bucket: Bucket, run: str, count: int, folder_files: int) -> float:
    agent = agent_of(volume, bucket, f"watched-{run}", watch=str(volume / "out"))
    agent.start()
    try:
        write_files(volume / "out", count, folder_files)
        wait_until(lambda: holds(agent, count), _LONGEST_SECONDS, "a snapshot has all files")
        return peak_mib(agent)
    finally:
        agent.kill()


def holds(agent: AgentProcess, count: int) -> bool:
    """Whether the snapshots that were committed have sent so many files."""
    taken = sum(line["sent"] for line in agent.log("snapshot.taken"))
    return taken >= count and len(agent.log("checkpoint.committed")) >= len(agent.log("snapshot.taken"))


def restore(volume: Path, bucket: Bucket, run: str, *options: str) -> float:
    words = ["restore", f"{bucket.destination}/{run}", f"--volume={volume}", *options]
    command = [sys.executable, "-c", _RESTORE, *words, f"--endpoint-url={bucket.endpoint_url}"]
    done = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=_LONGEST_SECONDS, check=True
    )
    return int(done.stdout.splitlines()[-1]) / 1024


def agent_of(volume: Path, bucket: Bucket, run: str, **settings: Any) -> AgentProcess:
    volume.mkdir()
    destination, endpoint_url = f"{bucket.destination}/{run}", bucket.endpoint_url
    return AgentProcess(volume, destination, environment=ENVIRONMENT, endpoint_url=endpoint_url, warm=False, **settings)


def write_files(folder: Path, count: int, folder_files: int) -> None:
    for number in range(count):
        path = folder / f"part-{number // folder_files:03d}" / f"sample-{number:06d}.bin"
        if number % folder_files == 0:
            path.parent.mkdir(parents=True)
        path.write_bytes(b"%d" % number * 40)


def peak_mib(agent: AgentProcess) -> float:
    return agent.memory_bytes("VmHWM") / 2**20


def report(peaks: dict[tuple[int, int], Peaks]) -> str:
    def column(name: str, count: int, folder_files: int) -> str:
        peak_mib: float = getattr(peaks[count, folder_files], name)
        return f"{peak_mib:.0f} ({per_file_kib(peaks, name, count, folder_files):.2f})"

    rows = [
        f"| {count:,}, {'in one folder' if count == folder_files else f'{folder_files:,} in a folder'} | "
        + " | ".join(column(name, count, folder_files) for name in MOST_KIB)
        + " |"
        for count, folder_files in SHAPES
    ]
    one = " | ".join(f"{getattr(peaks[1, 1], name):.0f}" for name in MOST_KIB)
    return (
        f"""# Memory and many files

Made by `python -m benchmarks.many_files` with Python {platform.python_version()} on {os.cpu_count()} CPUs. Files of
240 bytes whose paths have 26 characters, an S3 server (rclone) on loopback. Each figure is
the most memory that the process ever had, in MiB, and in brackets how much that is per file, in KiB, beyond what one
file takes. The injection gives restore and agent {MOST_MIB:.0f} MiB.

| files | agent, announced | agent started again | restore | agent, in an output directory | restore of this |
|---|---|---|---|---|---|
| 1 | {one} |
"""
        + "\n".join(rows)
        + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
