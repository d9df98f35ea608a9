"""The values of a prune: what is stored of a save, the deletion of one save, and the plan of all deletions.

A deletion owns the order in which its objects go: the marker, the files, the manifests.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from keepstep_agent.core.stored.object_layout import is_manifest, reserving_save

# The save ids that client and agent generate when nobody chose the attempt: `<attempt>-<counter or nonce>`. A folder
# with another name and without a manifest may be anybody's.
_GENERATED_SAVE: Final = re.compile(r"[0-9a-f]{8}[0-9a-f-]*-(?:[0-9a-f]{8}|c?\d{6,})")


def is_generated(save: str) -> bool:
    """Whether a save id is one that Keepstep has made."""
    return bool(_GENERATED_SAVE.fullmatch(save))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSave:
    """The objects below one `<name>/<save>/`, by key. `modified_at` is that of the youngest, by the store's clock."""

    name: str
    save: str
    sizes_bytes: Mapping[str, int]
    modified_at: float

    @property
    def shows_save(self) -> bool:
        """Whether the objects prove to be a save of Keepstep."""
        return is_generated(self.save) or any(is_manifest(key) or reserving_save(key) for key in self.sizes_bytes)

    @property
    def reserves(self) -> bool:
        """Whether it has the reservation of a snapshot."""
        return any(reserving_save(key) for key in self.sizes_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """One save to delete. `waves` are deleted one after the other: the marker, the files, the manifests.

    `name` and `save` are the folder of its objects, of which the youngest was written at `modified_at`. `may_share`:
    snapshots may name some of them, so `without_named` has to say which may go.
    """

    name: str
    save: str
    waves: tuple[tuple[str, ...], ...]
    size_bytes: int
    modified_at: float
    committed: bool
    reason: str
    may_share: bool

    @property
    def markers(self) -> tuple[str, ...]:
        return self.waves[0] if self.committed else ()

    @property
    def data(self) -> tuple[tuple[str, ...], ...]:
        """The waves after the marker's."""
        return self.waves[1:] if self.committed else self.waves


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A save that stays. `name` is the folder of its objects; empty if the listing does not show it."""

    name: str
    save: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """What to delete, or why nothing may be deleted. `kept` has every other save and why it stays."""

    deletions: tuple[Deletion, ...] = ()
    kept: tuple[Kept, ...] = ()
    refused: str = ""

    def withhold(self, why_keep: Callable[[Deletion], str]) -> "PrunePlan":
        """Return the plan without the deletions for which `why_keep` has a reason."""
        reasons = [(one, why_keep(one)) for one in self.deletions]
        return PrunePlan(
            deletions=tuple(one for one, reason in reasons if not reason),
            kept=(
                *self.kept,
                *(Kept(name=one.name, save=one.save, reason=reason) for one, reason in reasons if reason),
            ),
            refused=self.refused,
        )


def deletion_of(
    name: str,
    save: str,
    folder: StoredSave | None,
    reason: str,
    *,
    marker: tuple[str, ...] = (),
    may_share: bool,
    named: Collection[str] = (),
) -> Deletion:
    """Return the deletion of a save's marker and of those objects in its folder that are not in `named`."""
    sizes_bytes = folder.sizes_bytes if folder else {}
    free = sorted(key for key in sizes_bytes if key not in named)
    # Manifests and reservations last: after an interruption they still prove that the rest is a save of Keepstep. The
    # manifest of a save whose objects others share stays for that reason.
    shared = any(key in named for key in sizes_bytes)
    last = tuple(key for key in free if reserving_save(key) or (not shared and is_manifest(key)))
    files = tuple(key for key in free if not is_manifest(key) and not reserving_save(key))
    return Deletion(
        name=name,
        save=save,
        waves=tuple(wave for wave in (marker, files, last) if wave),
        size_bytes=sum(sizes_bytes[key] for wave in (files, last) for key in wave),
        modified_at=folder.modified_at if folder else 0.0,
        committed=bool(marker),
        reason=f"{reason}; others share some of its objects" if shared else reason,
        may_share=may_share,
    )
