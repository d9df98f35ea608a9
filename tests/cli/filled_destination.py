"""Fills a destination for commands, and reads the JSON that they answer."""

import asyncio
import json
import subprocess
from typing import Any

from tests.restore.stored_checkpoints import PART_BYTES, flip_byte, store_checkpoint

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.core.model import SaveInfo
from keepstep_agent.core.settings.values import StoreSettings
from keepstep_agent.core.stored.object_layout import file_key


def fill(settings: StoreSettings, *steps: int, flip: int = -1) -> list[SaveInfo]:
    """Checkpoints at a destination; a byte of step `flip` is then changed."""

    async def write() -> list[SaveInfo]:
        async with open_store(settings) as store:
            infos = [await store_checkpoint(store, step) for step in steps]
            for info in infos:
                if info.step == flip:
                    await flip_byte(store, file_key(info, "model-0.safetensors"), 2 * PART_BYTES)
            return infos

    return asyncio.run(write())


def answer(completed: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(completed.stdout)
