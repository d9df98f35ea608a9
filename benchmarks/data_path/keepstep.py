"""Keepstep's own: a running agent that is announced a checkpoint, and the whole command `keepstep restore`.

An agent runs before the checkpoint is there, so its clock starts with the announcement and ends when the checkpoint is
committed: manifests, listing, marker and its readback are in it. It has committed the same files before, as in any run
but for its first save: the modules that it loads with its first one are start-up, which is taken off every other tool
too, and by then it has measured the store's rate, by which it chooses the size of parts.
"""

import os
import sys
import sysconfig
import time
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Final

from benchmarks.data_path.comparison import KEEPSTEP
from benchmarks.data_path.process import Measurement, Watch, cpu_times, measure
from benchmarks.data_path.tools import TIMEOUT_SECONDS, Job, plain_environment
from tests.harness.agent_process import AgentProcess, wait_until
from tests.harness.control_group import ControlGroup

import keepstep_agent
from keepstep_api import names, signal_file

KEPT: Final = "s3://keep/restored"
"""Where the server keeps what it gets: a checkpoint with the sources' bytes, to restore."""
_HOUSEKEEPING_SECONDS: Final = 0.3
_LOOK_SECONDS: Final = 0.001


class Keepstep:
    version: Final = keepstep_agent.__version__

    def __init__(self, group: ControlGroup | None = None, *, checkout: Path | None = None) -> None:
        """In a `group` the agent, or the restore, has to do with its memory. `checkout`: whose code it is, if not ours.

        Another checkout must need the same libraries: they come from this environment.
        """
        self.name = f"{KEEPSTEP} of {checkout.name}" if checkout else KEEPSTEP
        self._group = group
        self._checkout = checkout

    def can(self, *, upload: bool, secure: bool) -> bool:
        return True

    def run(self, job: Job) -> Measurement:
        return self._upload(job, f"s3://bench/{job.prefix}") if job.upload else self._restore(job)

    def prepare(self, job: Job) -> None:
        """Upload what will be restored."""
        self._upload(job, KEPT)

    def _upload(self, job: Job, destination: str) -> Measurement:
        started = time.monotonic()
        agent = self._agent(job, destination)
        with self._group.inside() if self._group else nullcontext():
            agent.start()
        with ExitStack() as stack:
            stack.push(agent)
            start_seconds = time.monotonic() - started
            start = cpu_times(agent.process.pid)
            first = agent.checkpoints / "checkpoint-1"
            link_all(job.sources.iterdir(), first)
            agent.wait_committed(agent.announce(first, 1).save, TIMEOUT_SECONDS)
            time.sleep(_HOUSEKEEPING_SECONDS)
            folder = agent.checkpoints / "checkpoint-2"
            link_all(job.sources.iterdir(), folder)
            job.server.reset()
            watch = Watch(agent.process.pid)
            watch.start()
            before = cpu_times(agent.process.pid)
            agent.wait_committed(agent.announce(folder, 2).save, TIMEOUT_SECONDS)
            wall_seconds = (time.monotonic_ns() - before.at) / 1e9
            time.sleep(_HOUSEKEEPING_SECONDS)  # it lets go of its copies after that; it is the checkpoint's cost
            after = cpu_times(agent.process.pid)
            watch.stop()
            return Measurement(
                wall_seconds=wall_seconds,
                cpu_seconds=(after.process - before.process) / 1e9,
                main_thread_cpu_seconds=(after.main_thread - before.main_thread) / 1e9,
                start_wall_seconds=start_seconds,
                start_cpu_seconds=start.process / 1e9,
                peak_rss_bytes=watch.peak_rss_bytes,
                peak_anonymous_bytes=watch.peak_anonymous_bytes,
                counts=job.server.counts(),
            )

    def notice_seconds(self, job: Job) -> float:
        """From a SIGTERM in the middle of an upload until the signal file tells the ranks."""
        with self._agent(job, f"s3://bench/{job.prefix}") as agent:
            folder = agent.checkpoints / "checkpoint-1"
            link_all(job.sources.iterdir(), folder)
            size_bytes = sum(path.stat().st_size for path in job.sources.iterdir())
            job.server.reset()
            agent.announce(folder, 1)
            wait_until(lambda: job.server.counts().bytes_in > size_bytes / 4, TIMEOUT_SECONDS, "a quarter is sent")
            path = agent.volume / names.STATE_DIRECTORY / names.SIGNAL_FILE
            told_at = time.monotonic()
            agent.terminate()
            while not path.exists() or not signal_file.decode(path.read_bytes()).terminating:
                assert time.monotonic() - told_at < TIMEOUT_SECONDS, "the ranks are not told"
                time.sleep(_LOOK_SECONDS)
            seconds = time.monotonic() - told_at
            assert job.server.counts().bytes_in < size_bytes, "the upload was over"
            agent.kill()
            return seconds

    def _restore(self, job: Job) -> Measurement:
        volume = job.work / "volume"
        volume.mkdir()
        command = [sys.executable, str(Path(sysconfig.get_path("scripts")) / "keepstep"), "restore", KEPT]
        command += [f"--endpoint-url={job.endpoint_url}", f"--volume={volume}", f"--ca-bundle={job.server.ca_bundle}"]
        measurement = measure(
            self._group.wrap(command) if self._group else command,
            server=job.server,
            environment=self._environment(job),
            log=job.work / "log",
            timeout_seconds=TIMEOUT_SECONDS,
            written_to=volume,
        )
        (volume / "checkpoints" / "checkpoint-2").rename(job.destination)
        return measurement

    def _agent(self, job: Job, destination: str) -> AgentProcess:
        return AgentProcess(
            job.work / "volume",
            destination,
            environment=self._environment(job),
            endpoint_url=job.endpoint_url,
            ca_bundle=job.server.ca_bundle,
            # A process of its own, whose start and memory are what a user has.
            warm=False,
        )

    def _environment(self, job: Job) -> dict[str, str]:
        if self._checkout is None:
            return plain_environment(job)
        packages = (self._checkout / name for name in ("agent", "client", "proto"))
        return {**plain_environment(job), "PYTHONPATH": os.pathsep.join(map(str, packages))}


def link_all(paths: Iterable[Path], folder: Path) -> None:
    folder.mkdir(parents=True)
    for path in paths:
        os.link(path, folder / path.name)
