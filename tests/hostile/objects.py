"""Hostile objects in a real destination, read by what reads destinations: restore, ls, verify, prune.

Each round damages the newest of two checkpoints in one way and looks. Invariants: no exception but Mooring's own; none
takes longer than the bound; and what is restored is the newer one, byte for byte, or the older one, byte for byte.
"""

import asyncio
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.hostile.mutations import mutated_object, naming
from tests.restore.stored_checkpoints import store_checkpoint, store_packed_checkpoint

from mooring_agent.adapters.object_directory import ObjectDirectory
from mooring_agent.adapters.open_store import open_store
from mooring_agent.adapters.retrying_store import RetryingStore
from mooring_agent.catalog import check, list_committed, prune, read_marker
from mooring_agent.core.errors import ErrorKind, MooringError
from mooring_agent.core.model import SaveInfo
from mooring_agent.core.object_layout import manifest_key, marker_key, pack_key, pin_key
from mooring_agent.core.resume_pin import Pin, encode_pin
from mooring_agent.core.settings import RetentionSettings, StoreSettings
from mooring_agent.ports import ObjectStore
from mooring_agent.restore import restore

HANG_SECONDS: Final = 60.0
"""Of one round. It finds what never ends and judges no machine: a round takes hundredths of a second."""
_OLDER_STEP: Final = 1
_NEWER_STEP: Final = 2
_ATTEMPT: Final = "job-1"
_NOW: Final = 2_000_000_000.0


@dataclass(slots=True, kw_only=True)
class Found:
    """What the rounds came to."""

    rounds: int = 0
    newer: int = 0
    older: int = 0
    refused: int = 0


class Destination:
    """A directory with two whole checkpoints, one of them packed, and a pin; put back after every round."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "destination"
        self.root.mkdir(parents=True)
        self._pristine = folder / "pristine"
        self._volume = folder / "volume"
        self.settings = StoreSettings(destination=f"file://{self.root}")
        self._targets: dict[str, str] = {}
        self._files: dict[int, dict[str, bytes]] = {}
        self.objects = ObjectDirectory(self.root)

    async def fill(self) -> None:
        generator = random.Random(0)
        self._files[_OLDER_STEP] = {"model.bin": generator.randbytes(3000), "empty": b""}
        packed = {f"small/{number}": generator.randbytes(60) for number in range(3)}
        self._files[_NEWER_STEP] = {"model.bin": generator.randbytes(2000), **packed}
        async with open_store(self.settings) as store:
            await store_checkpoint(store, _OLDER_STEP, ranks=[self._files[_OLDER_STEP]])
            alone = {"model.bin": self._files[_NEWER_STEP]["model.bin"]}
            newer = await store_packed_checkpoint(store, _NEWER_STEP, alone=alone, packed=packed)
            pin = Pin(attempt=_ATTEMPT, step=newer.step, save=newer.save, marker=marker_key(newer))
            await store.put(pin_key(_ATTEMPT), encode_pin(pin))
        self._targets = _targets(newer)
        shutil.copytree(self.root, self._pristine)

    async def round(self, seed: int, found: Found, mutate: Callable[[bytes, random.Random], bytes]) -> None:
        generator = random.Random(seed)
        what = generator.choice(sorted(self._targets))
        target, marker = self.root / self._targets[what], self.root / self._targets["marker"]
        kept, kept_marker = target.read_bytes(), marker.read_bytes()
        try:
            changed = mutate(kept, generator)
            target.write_bytes(changed)
            if what == "manifest" and generator.random() < 0.7:
                # As who wrote it knows to do: else its checksum in the marker would tell before anything is decoded.
                marker.write_bytes(naming(kept_marker, changed))
            with_pin = what == "pin"
            async with asyncio.timeout(HANG_SECONDS), open_store(self.settings) as store:
                await self._look(RetryingStore(store), found, with_pin=with_pin, seed=seed)
        finally:
            target.write_bytes(kept)
            marker.write_bytes(kept_marker)
            shutil.rmtree(self._volume, ignore_errors=True)
            shutil.rmtree(self.root / ".mooring" / "damaged", ignore_errors=True)
        found.rounds += 1

    async def _look(self, store: ObjectStore, found: Found, *, with_pin: bool, seed: int) -> None:
        for committed in await list_committed(store):
            try:
                await read_marker(store, committed)
            except MooringError as error:
                if error.kind is not ErrorKind.CHECKPOINT_CORRUPT:
                    raise
            await check(store, committed, deep=True)
        retention = RetentionSettings(keep_last=1)
        try:
            await prune(store, retention, now=_NOW, dry_run=True)
        except MooringError:
            if not with_pin:
                raise
        self._volume.mkdir()
        try:
            restored = await restore(
                store,
                checkpoint_directory=self._volume / "checkpoints",
                volume=self._volume,
                state_directory=self._volume / ".mooring",
                attempt=_ATTEMPT if with_pin else "",
            )
        except MooringError as error:
            # A pin that cannot be read decides nothing, and nobody may decide instead of it.
            if not with_pin or error.kind is not ErrorKind.CHECKPOINT_CORRUPT:
                raise
            found.refused += 1
            return
        if restored is None:
            # A forged pin may say so.
            assert with_pin, seed
            found.refused += 1
            return
        files = {
            path.relative_to(restored.path).as_posix(): path.read_bytes()
            for path in restored.path.rglob("*")
            if path.is_file()
        }
        # Whoever forges a manifest and its marker may name a packed file anew; what is in it comes from its checksums.
        expected = self._files[restored.step]
        assert sorted(files.values()) == sorted(expected.values()), seed
        assert files == expected or restored.step == _NEWER_STEP, seed
        found.newer += restored.step == _NEWER_STEP
        found.older += restored.step == _OLDER_STEP


def _targets(newer: SaveInfo) -> dict[str, str]:
    return {
        "marker": marker_key(newer),
        "manifest": manifest_key(newer, 0),
        "pack": pack_key(newer, 0, 0),
        "pin": pin_key(_ATTEMPT),
    }


async def attack(folder: Path, *, rounds: int, seed: int) -> Found:
    destination = Destination(folder)
    await destination.fill()
    found = Found()
    for number in range(rounds):
        await destination.round(seed * 1_000_000 + number, found, mutated_object_or_bytes)
    return found


def mutated_object_or_bytes(body: bytes, generator: random.Random) -> bytes:
    """A pack has no JSON: bytes of its headers and files change, or it gets longer or shorter."""
    if body.startswith(b"{"):
        return mutated_object(body, generator)
    match generator.randrange(4):
        case 0:
            return body[: generator.randrange(len(body))]
        case 1:
            return body + generator.randbytes(generator.choice([1, 512, 100_000]))
        case _:
            changed = bytearray(body)
            for _ in range(generator.choice([1, 1, 50])):
                changed[generator.randrange(len(changed))] ^= generator.randrange(1, 256)
            return bytes(changed)
