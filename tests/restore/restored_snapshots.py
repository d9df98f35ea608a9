"""Restores snapshots to a volume, and reads and changes the base that they leave there."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from keepstep_agent.adapters.output.mirror_state import read_base, write_base
from keepstep_agent.adapters.volume.shared_folders import make_state_directory
from keepstep_agent.core.mirror.base import MirrorBase
from keepstep_agent.ports import ObjectStore
from keepstep_agent.restore.snapshots import RestoredSnapshots, restore_snapshots


async def run(
    store: ObjectStore, volume: Path, directories: Sequence[Path] = (), **options: Any
) -> RestoredSnapshots | None:
    return await restore_snapshots(
        store,
        volume=volume,
        directories=[str(directory) for directory in directories] or [str(volume / "out")],
        state_directory=volume / "state",
        checkpoint_directory=volume / "checkpoints",
        **options,
    )


async def restored(
    store: ObjectStore, volume: Path, directories: Sequence[Path] = (), **options: Any
) -> RestoredSnapshots:
    found = await run(store, volume, directories, **options)
    assert found is not None
    return found


def base_of(volume: Path) -> MirrorBase:
    return read_base(volume, volume / "state")


def keep_base(volume: Path, **changes: Any) -> None:
    """Change the base as the agent does."""
    make_state_directory(volume, volume / "state")
    write_base(volume, volume / "state", replace(base_of(volume), **changes))
