"""Hostile objects in a real destination, read by restore, ls, verify, prune, du, and by another agent's commit.

Each round damages the newest of two checkpoints in one way and looks; or the manifest that another pod has written of a
save that is being committed; or the record of a checkpoint on a volume; or the notice of a pod that ends. Invariants:
no exception but Keepstep's own; no round takes longer than the bound; what is restored is the newer one, byte for byte,
or the older one, byte for byte.
"""

import asyncio
import os
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.harness.bounds import HANG_SECONDS
from tests.hostile.mutations import mutated_bytes, mutated_object, naming
from tests.restore.one_output import restore
from tests.restore.stored_checkpoints import store_checkpoint, store_packed_checkpoint

from keepstep.checkpoints.records import read_records
from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.adapters.records import unannounced
from keepstep_agent.adapters.retrying_store import RetryingStore
from keepstep_agent.catalog.deep_check import check
from keepstep_agent.catalog.markers import list_committed, read_marker
from keepstep_agent.catalog.pruning import prune
from keepstep_agent.catalog.usage import storage_use
from keepstep_agent.core.agent.commands import Commit, Turn
from keepstep_agent.core.agent.events import Committed
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_agent.core.limits import MANIFEST_BYTES
from keepstep_agent.core.policies.restore_choice import Pin, encode_pin
from keepstep_agent.core.policies.storage_use import AgeLimits
from keepstep_agent.core.settings.values import RetentionSettings, StoreSettings
from keepstep_agent.core.stored.draining import Draining, encode_draining
from keepstep_agent.core.stored.manifest import decode_manifest
from keepstep_agent.core.stored.object_layout import draining_key, manifest_key, marker_key, pack_key, pin_key
from keepstep_agent.ports import StoreWriter
from keepstep_agent.restore.init_step import Restored
from keepstep_agent.restore.predecessors import Predecessors
from keepstep_agent.runtime.process.app import SystemClock
from keepstep_agent.runtime.work.committer import Committer
from keepstep_api.names import CHECKPOINT_DIRECTORY, RECORDS_DIRECTORY, STATE_DIRECTORY

WORK_SECONDS: Final = 2.0
"""Of one round, of the processor's time, which no other process takes part in."""
_OTHERS_MANIFEST: Final = "manifest of another agent"
_RECORD: Final = "record"
_NOTICE: Final = "notice of a pod that ends"
_AGE_SECONDS: Final = 100.0
"""Of that notice, in which every mutation has expired that can be read."""
_HALF_STEP: Final = 0
"""Older than both, and without a marker: nobody restores it."""
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
    longest_work_seconds: float = 0.0


class Destination:
    """Two whole checkpoints, one of them packed, a pin, half of a save, and a volume; put back after every round."""

    def __init__(self, folder: Path) -> None:
        self._root = folder / "destination"
        self._root.mkdir(parents=True)
        # With the newer checkpoint restored into it, and a copy of it for each round.
        self._restored = folder / "restored"
        self._volume = folder / "volume"
        self._settings = StoreSettings(destination=f"file://{self._root}")
        self._targets: dict[str, Path] = {}
        self._files: dict[int, dict[str, bytes]] = {}

    async def fill(self) -> None:
        generator = random.Random(0)
        self._files[_OLDER_STEP] = {"model.bin": generator.randbytes(3000), "empty": b""}
        packed = {f"small/{number}": generator.randbytes(60) for number in range(3)}
        self._files[_NEWER_STEP] = {"model.bin": generator.randbytes(2000), **packed}
        async with open_store(self._settings) as store:
            await store_checkpoint(store, _OLDER_STEP, ranks=[self._files[_OLDER_STEP]])
            alone = {"model.bin": self._files[_NEWER_STEP]["model.bin"]}
            newer = await store_packed_checkpoint(store, _NEWER_STEP, alone=alone, packed=packed)
            pin = Pin(attempt=_ATTEMPT, markers=(marker_key(newer),))
            await store.put(pin_key(_ATTEMPT, 0), encode_pin(pin))
            await store.put(draining_key("old"), encode_draining(Draining(holder="old-0", seconds_left=1.0)))
            self._half = await store_checkpoint(store, _HALF_STEP, world_size=2, committed=False)
            key = manifest_key(self._half, 0, 1)
            own = decode_manifest(await store.get(key, limit_bytes=MANIFEST_BYTES), key)
            self._commit = Commit(
                work=WorkId(Operation.COMMIT, self._half.save),
                info=self._half,
                ranks=own,
                turn=Turn.WRITE,
                sweep_uploads=False,
            )
            self._restored.mkdir()
            await self._restore(RetryingStore(store), self._restored, attempt="")
        keys = {
            "marker": marker_key(newer),
            "manifest": manifest_key(newer, 0, 1),
            "pack": pack_key(newer, 0, 0),
            "pin": pin_key(_ATTEMPT, 0),
            _NOTICE: draining_key("old"),
            _OTHERS_MANIFEST: manifest_key(self._half, 1, 1),
        }
        self._targets = {what: self._root / key for what, key in keys.items()}
        self._targets[_RECORD] = self._volume / STATE_DIRECTORY / RECORDS_DIRECTORY / f"{newer.name}.json"

    async def round(self, seed: int, found: Found) -> None:
        generator = random.Random(seed)
        shutil.copytree(self._restored, self._volume)
        what = generator.choice(sorted(self._targets))
        target, marker = self._targets[what], self._targets["marker"]
        kept, kept_marker = target.read_bytes(), marker.read_bytes()
        try:
            changed = _mutated(kept, generator)
            target.write_bytes(changed)
            if what == "manifest" and generator.random() < 0.7:
                # As who wrote it knows to do: else its checksum in the marker would tell before anything is decoded.
                marker.write_bytes(naming(kept_marker, changed))
            began = time.process_time()
            async with asyncio.timeout(HANG_SECONDS), open_store(self._settings) as opened:
                store = RetryingStore(opened)
                if what == _NOTICE:
                    written_at = target.stat().st_mtime - _AGE_SECONDS
                    os.utime(target, (written_at, written_at))
                    await Predecessors("new").wait(store)
                    shutil.rmtree(self._volume)
                    self._volume.mkdir()
                    await self._look(store, found, with_pin=False, seed=seed)
                elif what == _OTHERS_MANIFEST:
                    await self._try_to_commit(store, found)
                elif what == _RECORD:
                    await self._read_records(store, found, seed=seed)
                else:
                    shutil.rmtree(self._volume)
                    self._volume.mkdir()
                    await self._look(store, found, with_pin=what == "pin", seed=seed)
            found.longest_work_seconds = max(found.longest_work_seconds, time.process_time() - began)
            assert found.longest_work_seconds < WORK_SECONDS, seed
        finally:
            if what == _NOTICE:
                target.parent.mkdir(exist_ok=True)
            if target.parent.exists():
                target.write_bytes(kept)
            marker.write_bytes(kept_marker)
            (self._root / marker_key(self._half)).unlink(missing_ok=True)
            shutil.rmtree(self._volume, ignore_errors=True)
            shutil.rmtree(self._root / ".keepstep" / "damaged", ignore_errors=True)
        found.rounds += 1

    async def _look(self, store: StoreWriter, found: Found, *, with_pin: bool, seed: int) -> None:
        for committed in await list_committed(store):
            try:
                await read_marker(store, committed)
            except KeepstepError as error:
                if error.kind not in (ErrorKind.CHECKPOINT_CORRUPT, ErrorKind.FORMAT_UNKNOWN):
                    raise
            try:
                await check(store, committed)
            except KeepstepError as error:
                if error.kind is not ErrorKind.FORMAT_UNKNOWN:
                    raise
        retention = RetentionSettings(keep_last=1)
        try:
            await prune(store, retention, now=_NOW, dry_run=True)
        except KeepstepError:
            if not with_pin:
                raise
        ages = AgeLimits(now=_NOW, abandoned_after_seconds=0, orphan_age_seconds=0)
        assert len((await storage_use(store, ages, every_kind=True)).runs) == 1, seed
        try:
            restored = await self._restore(store, self._volume, attempt=_ATTEMPT if with_pin else "")
        except KeepstepError as error:
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
        self._compare(restored, found, seed=seed)

    async def _try_to_commit(self, store: StoreWriter, found: Found) -> None:
        """As the pod does whose part is there; what it commits can be read."""
        try:
            outcome = await Committer(SystemClock()).commit(store, self._commit)
        except KeepstepError:
            found.refused += 1
            return
        if isinstance(outcome, Committed):
            (half,) = [one for one in await list_committed(store) if one.save == self._half.save]
            await read_marker(store, half)
            found.newer += 1
        else:
            found.refused += 1

    async def _read_records(self, store: StoreWriter, found: Found, *, seed: int) -> None:
        """As the agent and the client do when they start, and restore, which may take what is on the volume."""
        checkpoints = self._volume / CHECKPOINT_DIRECTORY
        list(unannounced(self._volume, checkpoints, known=()))
        read_records(self._volume / STATE_DIRECTORY / RECORDS_DIRECTORY)
        restored = await self._restore(store, self._volume, attempt="")
        assert restored is not None, seed
        assert restored.step == _NEWER_STEP, seed
        self._compare(restored, found, seed=seed)

    async def _restore(self, store: StoreWriter, volume: Path, *, attempt: str) -> Restored | None:
        return await restore(
            store,
            checkpoint_directory=volume / CHECKPOINT_DIRECTORY,
            volume=volume,
            state_directory=volume / STATE_DIRECTORY,
            attempt=attempt,
        )

    def _compare(self, restored: Restored, found: Found, *, seed: int) -> None:
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


async def attack(folder: Path, *, rounds: int, seed: int) -> Found:
    destination = Destination(folder)
    await destination.fill()
    found = Found()
    for number in range(rounds):
        await destination.round(seed * 1_000_000 + number, found)
    return found


def _mutated(body: bytes, generator: random.Random) -> bytes:
    """A pack has no JSON: bytes of its headers and files change."""
    return mutated_object(body, generator) if body.startswith(b"{") else mutated_bytes(body, generator)
