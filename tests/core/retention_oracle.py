"""What must stay at a destination, said as people say it, and apart from the code: a second opinion for tests.

It looks at the checkpoints one by one and asks of each every question again, however long that takes.
"""

from collections.abc import Collection, Sequence
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
    every, seconds = settings.keep_every_steps, settings.keep_every_seconds
    if every and not one.series:
        milestones = range(0, one.step + 1, every)
        reached = [step for step in milestones if not any(step <= other.step < one.step for other in saves)]
        if one.step in milestones or [step for step in reached if step > 0]:
            return True
    if seconds:
        same = [other for other in saves if int(other.modified_at / seconds) == int(one.modified_at / seconds)]
        if _is_last(one, same):
            return True
    if settings.keep_daily:
        days = sorted({_day(other) for other in saves})
        if _day(one) in days[-settings.keep_daily :]:
            return _is_last(one, [other for other in saves if _day(other) == _day(one)])
    return False


def _day(one: CommittedSave) -> str:
    return datetime.fromtimestamp(one.modified_at, UTC).strftime("%Y-%m-%d")


def _is_last(one: CommittedSave, saves: Sequence[CommittedSave]) -> bool:
    """Whether none of the others was committed later, nor at the same moment with a higher step."""
    return not any(
        other.modified_at > one.modified_at or (other.modified_at == one.modified_at and _is_newer(other, one))
        for other in saves
    )
