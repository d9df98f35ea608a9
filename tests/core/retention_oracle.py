"""What must stay at a destination, said as people say it, and apart from the code: a second opinion for tests.

It looks at the checkpoints one by one and asks of each every question again, however long that takes.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime

from keepstep_agent.core.policies.restore_choice import CommittedSave
from keepstep_agent.core.settings.values import RetentionSettings


def must_stay(
    saves: Sequence[CommittedSave],
    settings: RetentionSettings,
    *,
    validated: Collection[str],
    damaged: Collection[str],
    protected: Collection[str],
) -> set[str]:
    """The ids of the saves of one series that may not be deleted."""
    if settings.keep_last == 0:
        return {one.save for one in saves}
    healthy = [one for one in saves if one.save not in damaged]
    return {
        one.save
        for one in saves
        if one.save in protected
        or _is_among_the_newest(one, saves, settings.keep_last, validated)
        or any(_is_wanted(one, group, settings) for group in (saves, healthy) if one in group)
    }


def wanted_by_policies(saves: Sequence[CommittedSave], settings: RetentionSettings) -> set[str]:
    """The ids of the saves of one series that are wanted for another reason than that they are the newest."""
    return {one.save for one in saves if _is_wanted(one, saves, settings)}


def _is_newer(one: CommittedSave, other: CommittedSave) -> bool:
    return (one.step, one.saved_at, one.save) > (other.step, other.saved_at, other.save)


def _is_among_the_newest(
    one: CommittedSave, saves: Sequence[CommittedSave], count: int, validated: Collection[str]
) -> bool:
    relied_upon = [
        other
        for other in saves
        if _is_newer(other, one)
        and other.save in validated
        # A run that went on from below it did not trust it.
        and not any(_is_newer(other, lower) and lower.modified_at > other.modified_at for lower in saves)
    ]
    return len(relied_upon) < count


def _is_wanted(one: CommittedSave, saves: Sequence[CommittedSave], settings: RetentionSettings) -> bool:
    every = settings.keep_every_steps
    if every and not one.series:
        milestones = range(0, one.step + 1, every)
        reached = [step for step in milestones if not any(step <= other.step < one.step for other in saves)]
        if one.step in milestones or [step for step in reached if step > 0]:
            return True
    stored_at = {other.save: other.modified_at for other in saves}
    saved_at = {other.save: min(other.saved_at, other.modified_at) or other.modified_at for other in saves}
    return any(_is_wanted_by_time(one, saves, settings, times) for times in (stored_at, saved_at))


def _is_wanted_by_time(
    one: CommittedSave, saves: Sequence[CommittedSave], settings: RetentionSettings, times: Mapping[str, float]
) -> bool:
    def day(one: CommittedSave) -> str:
        return datetime.fromtimestamp(times[one.save], UTC).strftime("%Y-%m-%d")

    def is_last(others: Iterable[CommittedSave]) -> bool:
        """Whether none of the others was committed later, nor at the same moment with a higher step."""
        return not any(
            times[other.save] > times[one.save] or (times[other.save] == times[one.save] and _is_newer(other, one))
            for other in others
        )

    if seconds := settings.keep_every_seconds:
        interval = int(times[one.save] / seconds)
        if is_last(other for other in saves if int(times[other.save] / seconds) == interval):
            return True
    days = sorted({day(other) for other in saves})
    return day(one) in days[len(days) - min(settings.keep_daily, len(days)) :] and is_last(
        other for other in saves if day(other) == day(one)
    )
