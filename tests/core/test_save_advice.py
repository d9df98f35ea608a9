"""The advice for a job, against values that were calculated by hand."""

import math
from dataclasses import replace

import pytest
from tests.core.play import Play

from keepstep_agent.core.agent import disk_pressure
from keepstep_agent.core.agent.events import DiskRead
from keepstep_agent.core.model import Kind
from keepstep_agent.core.policies.save_advice import Caveat, JobNumbers, SaveAdvice, advise
from keepstep_agent.core.settings.values import GIB, DiskSettings, RetentionSettings

MANY_PODS = JobNumbers(
    checkpoint_bytes=200 * GIB,
    rate_bytes_per_second=GIB,
    stall_seconds=2,
    write_seconds=0,
    mtbf_seconds=3 * 3600,
    pods=64,
)
"""A share is 3.125 GiB, so an upload takes 3.125 s; the square root of 2 x 2 x 10,800 is 207.85."""
SLOW_UPLOAD = JobNumbers(
    checkpoint_bytes=100 * GIB,
    rate_bytes_per_second=GIB / 4,
    stall_seconds=10,
    write_seconds=50,
    mtbf_seconds=4000,
    local_checkpoints=2,
    peak_factor=1.5,
)
"""The square root of 2 x 10 x 4,000 is 282.84, and a write and its upload take 50 + 400."""
IN_STEPS = JobNumbers(
    checkpoint_bytes=10 * GIB,
    rate_bytes_per_second=GIB,
    stall_seconds=1,
    write_seconds=0,
    mtbf_seconds=5000,
    step_seconds=3,
)
"""The square root of 2 x 1 x 5,000 is 100: 34 steps, which take 102 s."""
NO_STALL = replace(IN_STEPS, stall_seconds=0, step_seconds=0, checkpoint_bytes=GIB // 2)


@pytest.mark.parametrize(
    ("job", "field", "value"),
    [
        (MANY_PODS, "young_seconds", 207.8461),
        (MANY_PODS, "interval_seconds", 208),
        (MANY_PODS, "interval_steps", 0),
        (MANY_PODS, "upload_seconds", 3.125),
        (MANY_PODS, "recovery_point_seconds", 213.125),
        (MANY_PODS, "stalled_percent", 0.961538),
        (MANY_PODS, "lost_seconds", 109.125),
        (MANY_PODS, "lost_percent", 1.010417),
        # 5.125 to store it, 2 to commit, a margin of 10.
        (MANY_PODS, "grace_seconds", 18),
        (MANY_PODS, "volume_bytes", 9.375 * GIB),
        (MANY_PODS, "bandwidth_bytes_per_second", 3.125 * GIB / 208),
        (MANY_PODS, "checkpoints_a_month", 2_592_000 / 208),
        (MANY_PODS, "stored_bytes", 200 * GIB * 2_592_000 / 208),
        (SLOW_UPLOAD, "interval_seconds", 450),
        (SLOW_UPLOAD, "recovery_point_seconds", 900),
        (SLOW_UPLOAD, "lost_seconds", 675),
        (SLOW_UPLOAD, "lost_percent", 16.875),
        # 450 to store it, 2 to commit, and half of 450.
        (SLOW_UPLOAD, "grace_seconds", 677),
        (SLOW_UPLOAD, "volume_bytes", 450 * GIB),
        (IN_STEPS, "interval_steps", 34),
        (IN_STEPS, "interval_seconds", 102),
        (IN_STEPS, "recovery_point_seconds", 113),
        (IN_STEPS, "stalled_percent", 0.980392),
        # A step of 3, 11 to store it, 2 to commit, a margin of 10.
        (IN_STEPS, "grace_seconds", 26),
        (NO_STALL, "young_seconds", 0),
        (NO_STALL, "interval_seconds", 1),
        (NO_STALL, "stalled_percent", 0),
    ],
)
def test_the_advice_is_what_a_person_calculates(job: JobNumbers, field: str, value: float) -> None:
    assert getattr(advise(job), field) == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (RetentionSettings(), 2_592_000 / 102),
        (RetentionSettings(keep_last=5), 6),
        (RetentionSettings(keep_last=10**6), 2_592_000 / 102),
        # Every tenth save, which is 1,020 s after the one before it.
        (RetentionSettings(keep_last=5, keep_every_steps=340), 6 + 2_592_000 / 1020),
        # The first save at or past each multiple stays.
        (RetentionSettings(keep_last=5, keep_every_steps=1000), 6 + 2_592_000 / 3000),
        (RetentionSettings(keep_last=5, keep_every_steps=34), 2_592_000 / 102),
    ],
)
def test_the_bucket_holds_what_retention_keeps(retention: RetentionSettings, kept: float) -> None:
    advice = advise(replace(IN_STEPS, retention=retention))
    assert advice.stored_bytes == pytest.approx(10 * GIB * kept)


def _may_save_periodically(job: JobNumbers, volume_bytes: int) -> bool:
    """Whether the agent admits a periodic save on a volume of that size that holds what the trainer keeps."""
    play = Play()
    disk = DiskSettings(size_limit_bytes=volume_bytes, eviction_threshold_percent=0, peak_factor=job.peak_factor)
    play.state.settings = replace(play.state.settings, disk=disk)
    kept_bytes = job.local_checkpoints * job.share_bytes
    play.feed(DiskRead(at=play.now, used_bytes=kept_bytes, free_bytes=10**15, total_bytes=10**15))
    return disk_pressure.admit(play.state, Kind.PERIODIC, job.share_bytes).admitted


@pytest.mark.parametrize("job", [MANY_PODS, SLOW_UPLOAD, IN_STEPS])
def test_the_volume_is_the_smallest_on_which_no_periodic_save_is_refused(job: JobNumbers) -> None:
    volume_bytes = advise(job).volume_bytes
    assert _may_save_periodically(job, volume_bytes)
    assert not _may_save_periodically(job, volume_bytes - 1)


def test_the_interval_costs_least_of_all_where_uploads_are_fast() -> None:
    job = replace(MANY_PODS, rate_bytes_per_second=1e15)

    def cost(interval_seconds: float) -> float:
        return job.stall_seconds / interval_seconds + interval_seconds / 2 / job.mtbf_seconds

    advised = advise(job).interval_seconds
    assert all(cost(advised) < cost(advised * factor) for factor in (0.5, 0.9, 1.1, 2))


@pytest.mark.parametrize(
    ("job", "caveats"),
    [
        (replace(MANY_PODS, retention=RetentionSettings(keep_last=3)), {Caveat.YOUNG}),
        (MANY_PODS, {Caveat.YOUNG, Caveat.ALL_KEPT}),
        (SLOW_UPLOAD, {Caveat.YOUNG, Caveat.ALL_KEPT, Caveat.UPLOAD_BOUND, Caveat.SHORT_ON_AWS}),
        (
            replace(MANY_PODS, pods=16, retention=RetentionSettings(keep_last=3)),
            {Caveat.YOUNG},
        ),
        (
            replace(MANY_PODS, pods=4, retention=RetentionSettings(keep_last=3)),
            {Caveat.YOUNG, Caveat.SHORT_ON_GCP_AND_AZURE},
        ),
        (
            replace(MANY_PODS, stall_seconds=1200, retention=RetentionSettings(keep_last=3)),
            {Caveat.YOUNG, Caveat.LONG_STALL, Caveat.SHORT_ON_AWS},
        ),
        (
            replace(SLOW_UPLOAD, mtbf_seconds=800),
            {Caveat.YOUNG, Caveat.ALL_KEPT, Caveat.UPLOAD_BOUND, Caveat.SHORT_ON_AWS, Caveat.NO_PROGRESS},
        ),
        (
            replace(IN_STEPS, retention=RetentionSettings(keep_last=3, keep_every_steps=340)),
            {Caveat.YOUNG, Caveat.GROWS},
        ),
    ],
)
def test_what_the_numbers_do_not_say_is_said(job: JobNumbers, caveats: set[Caveat]) -> None:
    assert set(advise(job).caveats) == caveats


def test_extreme_numbers_give_finite_advice() -> None:
    for job in (
        JobNumbers(
            checkpoint_bytes=1,
            rate_bytes_per_second=1e18,
            stall_seconds=0,
            write_seconds=0,
            mtbf_seconds=1e-6,
            pods=10**5,
        ),
        JobNumbers(
            checkpoint_bytes=10**18, rate_bytes_per_second=1, stall_seconds=1e9, write_seconds=1e9, mtbf_seconds=1e12
        ),
    ):
        advice: SaveAdvice = advise(job)
        assert all(
            math.isfinite(value) and value >= 0
            for name in SaveAdvice.__slots__
            if isinstance(value := getattr(advice, name), int | float)
        )
        assert advice.stalled_percent <= 100
        assert advice.lost_percent <= 100
