"""One training run through several pods: each is told to end, its volume is lost, and the next goes on from the bucket.

What is asserted of every stop is here: all ranks saved at one step within two of the notice, the checkpoint of all
ranks is committed, the job's exit is an error, and nothing of it is left.
"""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness.agent_process import AgentProcess
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.servers.server import Bucket
from tests.trainers.job import SLOW_SECONDS, Job
from tests.trainers.trainers import STEPS, Moment, Notice, Stop, Trainer

from keepstep.checkpoints.records import read_records
from keepstep_api import names

GRACE_SECONDS = 2 * HANG_SECONDS
STEPS_AFTER_NOTICE = 2


class Chain:
    """`step` is where the next pod begins, that of the newest committed checkpoint; `volume` that of the last job."""

    def __init__(self, trainer: Trainer, bucket: Bucket, folder: Path) -> None:
        self.trainer = trainer
        self.step = 0
        self.losses: dict[int, str] = {}
        self._view = BucketView(bucket)
        self._bucket = bucket
        self._folder = folder
        self._pods = 0
        self.volume = folder

    @contextmanager
    def pod(self, *, autoload: bool = False) -> Iterator[tuple[AgentProcess, Job]]:
        """A fresh volume with what the bucket has, an agent, and a job that is about to be trained."""
        self._pods += 1
        self.volume = self._folder / f"volume-{self._pods}"
        if self.step:
            self._view.restore(self.volume)
        agent = AgentProcess(
            self.volume,
            self._bucket.destination,
            endpoint_url=self._bucket.endpoint_url,
            grace_seconds=GRACE_SECONDS,
        )
        with agent, self._job(self.volume, self._folder / f"pod-{self._pods}", autoload=autoload) as job:
            yield agent, job

    def stop(self, stop: Stop) -> None:
        """Train on from the newest checkpoint until told to end; then that is at another step."""
        with self.pod(autoload=stop.autoload) as (agent, job):
            held = 1 if stop.moment is Moment.SAVE else job.ranks
            job.order(hold=stop.moment, at_step=self.step + stop.after)
            job.wait_held(stop.moment, ranks=held)
            # Whoever is not held, since it saves in the background, has time to hear of the notice within two steps.
            job.order(hold=stop.moment, at_step=self.step + stop.after, step_seconds=SLOW_SECONDS)
            # A step that was in flight was none of the slow ones.
            job.wait_still()
            noticed = max(*job.last_steps(), self.step)
            _deliver(stop.notice, agent, job)
            if stop.twice:
                job.order(hold=Moment.SAVE, at_step=self.step, step_seconds=SLOW_SECONDS)
                job.wait_held(Moment.SAVE, ranks=1)
                _deliver(stop.notice, agent, job)
            job.order(step_seconds=SLOW_SECONDS)
            assert job.wait() != 0, job.output()
            agent.terminate()
            assert agent.wait(HANG_SECONDS) == 0, agent.log_text()
            self._check_snapshots(agent)
            self.losses |= job.losses()
            # Who resumes at the end of an epoch evaluates first, and may be told before its first step.
            stopped = [max(step, self.step) for step in job.last_steps()]
            assert len(set(stopped)) == 1, f"the ranks trained to different steps: {stopped}\n{job.output()}"
            self.step = self._newest()
            assert noticed <= self.step <= noticed + STEPS_AFTER_NOTICE, job.output()
            assert stopped[0] == self.step, f"trained on to {stopped} after the save of {self.step}\n{job.output()}"

    def finish(self) -> None:
        """Train on to the end."""
        with self.pod() as (agent, job):
            assert job.wait() == 0, job.output()
            agent.terminate()
            assert agent.wait(HANG_SECONDS) == 0, agent.log_text()
            self._check_snapshots(agent)
            self.losses |= job.losses()
            self.step = self._newest()

    def train_undisturbed(self) -> dict[int, str]:
        """The same training in one go and without an agent; its losses."""
        self.volume = self._folder / "undisturbed-volume"
        with self._job(self.volume, self._folder / "undisturbed") as job:
            assert job.wait() == 0, job.output()
        return job.losses()

    def newest_checkpoint(self) -> Path:
        """Where the job saved last, on the volume that it had."""
        newest = read_records(self.volume / names.STATE_DIRECTORY / names.RECORDS_DIRECTORY)[0]
        return self.volume / (newest.directory or names.CHECKPOINT_DIRECTORY) / newest.name

    def _check_snapshots(self, agent: AgentProcess) -> None:
        """The trainer announces what it saves, however long that takes: no snapshot has anything of it."""
        announced = {line["name"] for line in agent.log("checkpoint.announced") if line["kind"] != "snapshot"}
        stored = [key for key in self._view.keys("node-0/") if announced & set(key.split("/")[2:])]
        assert stored == []

    def _newest(self) -> int:
        """The step of the newest committed checkpoint, with the shares of all who write."""
        marker = json.loads(self._view.read(self._view.markers()[-1]))
        assert sum(one["rank_count"] for one in marker["manifests"]) == self.trainer.writers, marker
        return int(marker["step"])

    def _job(self, volume: Path, folder: Path, *, autoload: bool = False) -> Job:
        arguments = ["--steps", str(STEPS), *self.trainer.arguments]
        return Job(
            self.trainer.program,
            arguments,
            volume=volume,
            folder=folder,
            begin=self.step,
            autoload=autoload,
            without_keepstep=autoload and self.trainer.zero_code,
        )


def _deliver(notice: Notice, agent: AgentProcess, job: Job) -> None:
    match notice:
        case Notice.LAUNCHER:
            job.signal(None, signal.SIGTERM)
        case Notice.RANK_0:
            job.signal(0, signal.SIGTERM)
        case Notice.RANK_1:
            job.signal(1, signal.SIGTERM)
        case Notice.SIGNAL_FILE:
            # As the preStop hook of a pod does.
            agent.notify_termination(source="preStop")
