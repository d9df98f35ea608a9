"""Runs the init step, and tells what is on the volume after it."""

import json
from pathlib import Path
from typing import Any

from tests.restore.one_output import restore

from keepstep_agent.ports import StoreWriter
from keepstep_agent.restore.init_step import Restored


async def run(store: StoreWriter, volume: Path, **options: Any) -> Restored | None:
    options = {"state_directory": volume / ".keepstep" / "agent", **options}
    return await restore(store, checkpoint_directory=volume / "checkpoints", volume=volume, **options)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def record(volume: Path, name: str) -> Any:
    return json.loads((volume / ".keepstep" / "records" / f"{name}.json").read_text())


def leftovers(volume: Path) -> list[Path]:
    return list((volume / ".keepstep" / "incoming").iterdir())
