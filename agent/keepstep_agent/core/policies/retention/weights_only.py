"""Decides which kept checkpoints lose their optimizer's files. docs/design/0020.

Invariants: what a restore may take stays whole: the newest checkpoints, as `policies.Newest` says, and what a run
resumes from; some file of its own always stays.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from keepstep_agent.core.model import is_optimizer_file
from keepstep_agent.core.policies.restore_choice import BOTH_CLOCKS, CommittedSave, by_line, newest_first
from keepstep_agent.core.policies.retention.deletions import PrunePlan, StoredSave
from keepstep_agent.core.policies.retention.horizon import skipped
from keepstep_agent.core.policies.retention.policies import Newest, why_wanted
from keepstep_agent.core.policies.retention.verdict import is_live
from keepstep_agent.core.settings.values import RetentionSettings
from keepstep_agent.core.stored.object_layout import file_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A save that loses the objects `keys`, of `size_bytes` together.

    `committed` is the save as it was listed: committed, or weights only already if a prune was interrupted.
    """

    committed: CommittedSave
    name: str
    keys: tuple[str, ...]
    size_bytes: int


def plan_reductions(
    plan: PrunePlan,
    committed: Sequence[CommittedSave],
    stored: Sequence[StoredSave],
    settings: RetentionSettings,
    *,
    recorded: Mapping[str, Sequence[str]],
    validated: Collection[str],
    damaged: Collection[str],
    protected: Collection[str],
    live: Collection[str],
) -> tuple[Reduction, ...]:
    """Return what a prune drops of the saves that its plan keeps. The arguments are those of `plan_prune`.

    `recorded` has the patterns in the weights markers by save, also of those that have a commit marker too.
    """
    if plan.refused:
        return ()
    folders = {one.save: one for one in stored}
    going = {one.save for one in plan.deletions}
    announced = newest_first([one for one in committed if not one.series])
    newest = Newest(count=settings.keep_last, justifying=set(validated) - skipped(committed))
    lines = by_line(announced).values()
    whole = {*(save for line in lines for save in why_wanted(line, iter((newest,)), damaged)), *damaged, *protected}
    old = _old(announced, settings)
    found = []
    for one in announced:
        folder = folders.get(one.save)
        if folder is None or one.save in going:
            continue
        patterns = recorded.get(one.save)
        if one.weights_only:
            keys = optimizer_keys(folder, patterns or ())
            is_due = bool(keys)
        elif patterns and not optimizer_keys(folder, patterns):
            # A late answer or a slow agent has written its commit marker again.
            keys, is_due = (), True
        else:
            keys = optimizer_keys(folder, patterns or settings.optimizer_patterns)
            is_due = bool(keys) and one.save in old - whole and not is_live(one.save, live)
        if is_due:
            size_bytes = sum(folder.sizes_bytes[key] for key in keys)
            found.append(Reduction(committed=one, name=folder.name, keys=keys, size_bytes=size_bytes))
    return tuple(found)


def _old(announced: Sequence[CommittedSave], settings: RetentionSettings) -> set[str]:
    """Return the saves that were committed long before the last one, by both clocks."""
    if not settings.weights_only_after or settings.keep_last <= 0:
        return set()
    whole = [one for one in announced if not one.weights_only]
    newest_at = {clock: max(map(clock, whole), default=0.0) for clock in BOTH_CLOCKS}
    return {
        one.save
        for one in announced
        if all(at - clock(one) > settings.weights_only_after for clock, at in newest_at.items())
    }


def optimizer_keys(folder: StoredSave, patterns: Collection[str]) -> tuple[str, ...]:
    """Return the keys of a save's files with the optimizer's state; none if no other file would stay."""
    paths = {key: path for key in folder.sizes_bytes if (path := file_path(key))}
    keys = sorted(key for key, path in paths.items() if is_optimizer_file(path, patterns))
    return tuple(keys) if len(keys) < len(paths) else ()
