"""How far down a prune has to look, and which saves were skipped: they are newer than one that was committed later."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from keepstep_agent.core.policies.restore_choice import CommittedSave, by_line, newest_first
from keepstep_agent.core.settings.values import RetentionSettings

_RECENT: Final = 500
"""The least announced checkpoints above a horizon. They fill half of what a store lists at a time, so as many may come
before a second request is needed."""


def skipped(committed: Iterable[CommittedSave]) -> set[str]:
    """Return the saves that are newer than a save of their line that was committed after them.

    A run continued from an older checkpoint then, perhaps because these cannot be restored although their sizes are
    right. They may be kept, but they justify no deletion. So the save that was committed last stays: all saves newer
    than that one are skipped.
    """
    found: set[str] = set()
    for line in by_line(committed).values():
        last_commit_at = 0.0
        for one in reversed(newest_first(line)):
            if one.modified_at < last_commit_at:
                found.add(one.save)
            last_commit_at = max(last_commit_at, one.modified_at)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """How far down a prune has to look if a whole one looked at everything a while ago: to `step`, that one included.

    `older_commits_at`: when the last of the checkpoints below was committed, by the key of their output directory.
    """

    step: int = 0
    older_commits_at: Mapping[str, float] = field(default_factory=dict)

    def skipped(self, committed: Iterable[CommittedSave]) -> set[str]:
        """Return what `skipped` does of all announced checkpoints, those below the horizon included."""
        found = tuple(committed)
        below = self.older_commits_at
        return skipped(found) | {
            one.save for one in found if not one.series and one.modified_at < below.get(one.output_key, 0.0)
        }


def horizon_of(announced: Sequence[CommittedSave], settings: RetentionSettings) -> Horizon:
    """Return the horizon below the newest of all announced checkpoints, which are in the order of a store's listing."""
    count = max(_RECENT, 2 * settings.keep_last)
    steps = [one.step for one in announced]
    # A store with an order of its own shows the newest anywhere.
    if len(steps) <= count or steps != sorted(steps, reverse=True):
        return Horizon()
    step = steps[count - 1]
    lines = by_line(one for one in announced if one.step < step).items()
    return Horizon(
        step=step, older_commits_at={key: max(one.modified_at for one in found) for (_, key), found in lines}
    )
