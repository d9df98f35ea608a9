"""Advises how often to save, and what that needs, from a few numbers about a job.

Owns the arithmetic. Young's interval, the square root of twice the stall times the MTBF, minimises the time that saves
hold up training plus the work that failures make it redo. A checkpoint is of no use before it is stored. The interval
is therefore never shorter than a write and an upload. A checkpoint's bytes are divided evenly between the pods.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from keepstep_agent.core.settings.values import DiskSettings, RetentionSettings, TerminationSettings

MONTH_SECONDS: Final = 30 * 24 * 3600.0
_LEAST_MARGIN_SECONDS: Final = 10.0
_MARGIN: Final = 0.5
"""The share of a save's time that a grace period has besides: rates vary, most of all when all pods end at once."""
_LONG_STALL: Final = 0.1
"""The share of the MTBF above which Young's formula is off."""
_SPOT_SECONDS: Final = (30.0, 120.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNumbers:
    """What is known of a job. `rate_bytes_per_second` is one pod's, the other numbers are the whole job's.

    `write_seconds`: how long the files of a save take to be written, which is longer than the stall if the save is
    asynchronous. `step_seconds` 0: not known. `local_checkpoints`: how many complete ones the trainer keeps on the
    volume.
    """

    checkpoint_bytes: int
    rate_bytes_per_second: float
    stall_seconds: float
    write_seconds: float
    mtbf_seconds: float
    pods: int = 1
    step_seconds: float = 0.0
    local_checkpoints: int = 1
    peak_factor: float = DiskSettings().peak_factor
    retention: RetentionSettings = field(default_factory=RetentionSettings)

    @property
    def share_bytes(self) -> int:
        """What one pod writes and uploads of each checkpoint."""
        return -(-self.checkpoint_bytes // self.pods)

    @property
    def stored_after_seconds(self) -> float:
        """From the beginning of a save until it can be committed."""
        return max(self.stall_seconds, self.write_seconds) + self.share_bytes / self.rate_bytes_per_second


class Caveat(StrEnum):
    """What the numbers do not say by themselves."""

    YOUNG = (
        "The interval minimises stalls plus redone work. It counts neither restarts nor the failures that come with a "
        "notice, which lose nothing if the grace period suffices."
    )
    UPLOAD_BOUND = (
        "A write and its upload take longer than Young's interval: with a faster upload, saving more often would pay."
    )
    LONG_STALL = "Young's formula is for stalls that are far shorter than the MTBF. This one is not: shorten it first."
    NO_PROGRESS = "The job fails about as often as it can store a checkpoint, and hardly gets on."
    SHORT_ON_GCP_AND_AZURE = "A spot machine on GCP or Azure ends 30 s after its notice, before the save is stored."
    SHORT_ON_AWS = "A spot machine ends 120 s after its notice on AWS, sooner elsewhere, before the save is stored."
    ALL_KEPT = "Without --keep-last every checkpoint is kept, and the storage grows for as long as the run lasts."
    GROWS = "What --keep-every-steps keeps grows for as long as the run lasts."


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAdvice:
    """What to set, and what follows.

    `recovery_point_seconds` is the worst, `lost_seconds` the mean of what a failure without notice costs. The two
    percentages are of the wall time. `interval_steps` is 0 if a step's time is not known. `volume_bytes` and
    `bandwidth_bytes_per_second` are one pod's. `stored_bytes` is what the bucket holds after a month.
    """

    young_seconds: float
    interval_seconds: float
    interval_steps: int
    upload_seconds: float
    recovery_point_seconds: float
    stalled_percent: float
    lost_seconds: float
    lost_percent: float
    grace_seconds: int
    volume_bytes: int
    bandwidth_bytes_per_second: float
    checkpoints_a_month: float
    stored_bytes: int
    caveats: tuple[Caveat, ...]


def advise(job: JobNumbers) -> SaveAdvice:
    young_seconds = math.sqrt(2 * job.stall_seconds * job.mtbf_seconds)
    interval_seconds = float(max(1, math.ceil(max(young_seconds, job.stored_after_seconds))))
    interval_steps = 0
    if job.step_seconds:
        interval_steps = math.ceil(interval_seconds / job.step_seconds)
        interval_seconds = interval_steps * job.step_seconds
    lost_seconds = interval_seconds / 2 + job.stored_after_seconds
    grace_seconds = _grace_seconds(job)
    return SaveAdvice(
        young_seconds=young_seconds,
        interval_seconds=interval_seconds,
        interval_steps=interval_steps,
        upload_seconds=job.share_bytes / job.rate_bytes_per_second,
        recovery_point_seconds=interval_seconds + job.stored_after_seconds,
        stalled_percent=100 * min(1.0, job.stall_seconds / interval_seconds),
        lost_seconds=lost_seconds,
        lost_percent=100 * min(1.0, lost_seconds / job.mtbf_seconds),
        grace_seconds=grace_seconds,
        volume_bytes=_volume_bytes(job),
        bandwidth_bytes_per_second=job.share_bytes / interval_seconds,
        checkpoints_a_month=MONTH_SECONDS / interval_seconds,
        stored_bytes=int(job.checkpoint_bytes * _kept_after_a_month(job, interval_seconds, interval_steps)),
        caveats=_caveats(job, young_seconds, interval_seconds, grace_seconds),
    )


def _grace_seconds(job: JobNumbers) -> int:
    """Return the time for the step that is under way, a just-in-time save of it, its upload and its commit."""
    margin_seconds = max(_LEAST_MARGIN_SECONDS, _MARGIN * job.stored_after_seconds)
    reserve_seconds = TerminationSettings().commit_reserve_seconds
    return math.ceil(job.step_seconds + job.stored_after_seconds + reserve_seconds + margin_seconds)


def _volume_bytes(job: JobNumbers) -> int:
    """Return the room with which `core.agent.disk_pressure` refuses no periodic save.

    When one begins, the volume holds what the trainer keeps. The save needs room while it is written, and so does a
    just-in-time save after it. An upload takes no room of its own as long as it ends before the next save.
    """
    return math.ceil(job.share_bytes * (job.local_checkpoints + job.peak_factor + 1))


def _kept_after_a_month(job: JobNumbers, interval_seconds: float, interval_steps: int) -> float:
    """Return how many checkpoints the bucket holds after a month of training, with the one that is being uploaded."""
    saves, retention = MONTH_SECONDS / interval_seconds, job.retention
    if not retention.keep_last:
        return saves
    kept = retention.keep_last + 1.0
    if retention.keep_every_steps:
        # The first checkpoint at or past each multiple, of those that are saved.
        assert interval_steps, "the caller knows how long a step takes if it keeps by steps"
        kept += MONTH_SECONDS / (max(retention.keep_every_steps, interval_steps) * job.step_seconds)
    return min(saves, kept)


def _caveats(
    job: JobNumbers, young_seconds: float, interval_seconds: float, grace_seconds: float
) -> tuple[Caveat, ...]:
    gcp_seconds, aws_seconds = _SPOT_SECONDS
    keep_every_steps = job.retention.keep_every_steps
    true = {
        Caveat.YOUNG: True,
        Caveat.UPLOAD_BOUND: job.stored_after_seconds > young_seconds,
        Caveat.LONG_STALL: job.stall_seconds > _LONG_STALL * job.mtbf_seconds,
        Caveat.NO_PROGRESS: interval_seconds + job.stored_after_seconds >= job.mtbf_seconds,
        Caveat.SHORT_ON_GCP_AND_AZURE: gcp_seconds < grace_seconds <= aws_seconds,
        Caveat.SHORT_ON_AWS: grace_seconds > aws_seconds,
        Caveat.ALL_KEPT: not job.retention.keep_last,
        Caveat.GROWS: keep_every_steps > 0,
    }
    return tuple(caveat for caveat, holds in true.items() if holds)
