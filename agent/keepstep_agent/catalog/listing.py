"""Lists a whole destination, sorted into what pruning distinguishes. Foreign objects are left out."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from keepstep_agent.catalog.markers import committed_save, weights_only_save
from keepstep_agent.core.policies.restore_choice import CommittedSave
from keepstep_agent.core.policies.retention.deletions import StoredSave
from keepstep_agent.core.stored.object_layout import (
    DAMAGED_PREFIX,
    DRAINING_PREFIX,
    LEDGER_PREFIX,
    PROBE_PREFIX,
    PRUNED_PREFIX,
    RESUME_PREFIX,
    parse_note_key,
    reserving_save,
)
from keepstep_agent.ports import ObjectInfo, StoreReader
from keepstep_api.names import STATE_DIRECTORY


@dataclass(slots=True)
class Listing:
    """`committed` are announced checkpoints and snapshots. Of those in `weights_only` only the weights are left, unless
    they are committed too. `folders` are by name and save, `reservations` by save.
    """

    committed: list[CommittedSave] = field(default_factory=list)
    weights_only: list[CommittedSave] = field(default_factory=list)
    folders: dict[tuple[str, str], list[ObjectInfo]] = field(default_factory=lambda: defaultdict(list))
    reservations: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    pins: list[ObjectInfo] = field(default_factory=list)
    leftovers: list[ObjectInfo] = field(default_factory=list)
    """What killed probes, prunes and draining agents have left, once it is old."""
    ledger: list[ObjectInfo] = field(default_factory=list)
    damaged: set[str] = field(default_factory=set)

    def stored(self) -> Iterator[StoredSave]:
        for (name, save), objects in self.folders.items():
            yield StoredSave(
                name=name,
                save=save,
                sizes_bytes={one.key: one.size_bytes for one in objects},
                modified_at=max(one.modified_at for one in objects),
            )


async def list_all(store: StoreReader, prefix: str = "") -> Listing:
    """List what lies below `prefix`."""
    found = Listing()
    async for one in store.list(prefix):
        if marker := committed_save(one):
            found.committed.append(marker)
        elif left := weights_only_save(one):
            found.weights_only.append(left)
        elif one.key.startswith(RESUME_PREFIX):
            found.pins.append(one)
        elif one.key.startswith((PROBE_PREFIX, PRUNED_PREFIX, DRAINING_PREFIX)):
            found.leftovers.append(one)
        elif one.key.startswith(LEDGER_PREFIX):
            found.ledger.append(one)
        elif one.key.startswith(DAMAGED_PREFIX):
            found.damaged.add(parse_note_key(one.key)[0])
        elif not one.key.startswith(f"{STATE_DIRECTORY}/") and one.key.count("/") >= 2:
            name, save, _ = one.key.split("/", 2)
            found.folders[name, save].append(one)
            if reserving_save(one.key):
                found.reservations[save].append(one.key)
    return found
