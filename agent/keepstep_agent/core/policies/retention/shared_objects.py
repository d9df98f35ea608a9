"""Withholds from a plan what snapshots share, and what has changed since the plan was made."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from keepstep_agent.core.policies.restore_choice import CommittedSave
from keepstep_agent.core.policies.retention.deletions import Deletion, PrunePlan, StoredSave, deletion_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondLook:
    """What a prune sees after its tombstones are stored. `folders` are saves with objects, by name and save.

    `committed` is listed after `reserved`, which has the name and save of each snapshot that is named by the
    reservation of a save that is not in `committed`.
    """

    folders: Mapping[tuple[str, str], StoredSave]
    reserved: Collection[tuple[str, str]]
    committed: Sequence[CommittedSave]


def without_reserved(plan: PrunePlan, committed: Iterable[CommittedSave], look: SecondLook) -> PrunePlan:
    """Withhold what a snapshot in progress shares, and what has changed since the plan was made of `committed`."""
    doomed = {key for one in plan.deletions for key in one.markers}
    markers, saves = {one.key for one in look.committed}, {one.save for one in look.committed}
    changed = {one.series for one in committed if one.key not in markers and one.key not in doomed}

    def why_keep(one: Deletion) -> str:
        place = one.name, one.save
        if not one.may_share:
            return ""
        if place in look.reserved:
            return "a snapshot in progress shares its objects"
        if one.committed:
            return "other snapshots of its series were deleted meanwhile" if one.name in changed else ""
        if one.save in saves:
            return "it was committed meanwhile"
        folder = look.folders.get(place)
        return "it is still being written" if folder and folder.modified_at > one.modified_at else ""

    return plan.withhold(why_keep)


def without_named(plan: PrunePlan, named: Collection[str], look: SecondLook) -> PrunePlan:
    """Reduce the deletions to the objects that are not in `named`: the keys that remaining snapshots name."""
    reduced = [
        deletion_of(
            one.name,
            one.save,
            look.folders.get((one.name, one.save)),
            one.reason,
            marker=one.markers,
            may_share=True,
            named=named,
        )
        if one.may_share
        else one
        for one in plan.deletions
    ]
    return PrunePlan(deletions=tuple(reduced), kept=plan.kept, refused=plan.refused).withhold(
        lambda one: "" if one.waves else "other snapshots share what is left of it"
    )
