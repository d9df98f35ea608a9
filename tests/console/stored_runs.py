"""Stored runs for tests of the console: markers and ledgers as agents leave them, without the checkpoints' files."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.core.noted_lives import NotedLife, killed_and_resumed
from tests.restore.stored_checkpoints import PART_BYTES, file_entry, reference_of

from keepstep_agent.core.model import Kind, RankManifest, SaveInfo
from keepstep_agent.core.stored.ledger import AgentLife, Resumed, encode_life
from keepstep_agent.core.stored.manifest import commit_marker, encode_manifest, encode_marker
from keepstep_agent.core.stored.object_layout import ledger_key, marker_key
from keepstep_agent.ports import StoreWriter

Objects = Mapping[str, tuple[bytes, float]]
"""Body and time of the last change, by key."""


def marker_of(
    step: int, *, at: float, save: str = "", kind: Kind = Kind.PERIODIC, directory: str = ""
) -> tuple[str, bytes]:
    """Return the key and the body of a commit marker."""
    save, name = save or f"save-{step}", f"checkpoint-{step}"
    info = SaveInfo(save=save, name=name, step=step, kind=kind, world_size=1, directory=directory)
    manifest = RankManifest(
        info=info, rank=0, saved_at=at, files=(file_entry("model.pt", b"x" * 1000, PART_BYTES),), single_file=False
    )
    encoded = encode_manifest([manifest])
    return marker_key(info), encode_marker(commit_marker([manifest], [reference_of([manifest], encoded)]))


def run_objects(
    lives: Sequence[AgentLife] = (),
    *,
    steps: Mapping[int, float] | None = None,
    kinds: Mapping[int, Kind] | None = None,
    directories: Mapping[int, str] | None = None,
) -> Objects:
    """Return a run's objects: the ledger, one object for each life, and a marker for each step, committed then."""
    found: dict[str, tuple[bytes, float]] = {}
    for step, at in (steps or {}).items():
        kind, directory = (kinds or {}).get(step, Kind.PERIODIC), (directories or {}).get(step, "")
        key, body = marker_of(step, at=at, kind=kind, directory=directory)
        found[key] = body, at
    for life in lives:
        at = life.entries[-1].at
        found[ledger_key(life.attempt, at, f"{life.agent}.1")] = encode_life(life), at
    return found


def interrupted_run() -> Objects:
    """The run of `killed_and_resumed`, whose checkpoints are all stored."""
    kinds = {720: Kind.JUST_IN_TIME}
    return run_objects(
        [one.life for one in killed_and_resumed()], steps={100: 1140.0, 200: 1250.0, 720: 1906.0}, kinds=kinds
    )


def long_run(checkpoints: int, *, began_at: float = 1_700_000_000.0, every_seconds: float = 600.0) -> Objects:
    """Return a run that saves regularly, and still runs."""
    life, at = NotedLife("agent-1"), began_at
    life.start(at, restore=(at - 10, at - 5), resumed=Resumed.NOTHING)
    life.ranks(at + 5, 8)
    steps = {}
    for number in range(1, checkpoints + 1):
        at = began_at + number * every_seconds
        life.save(at, at + 3, number * 100)
        life.commit(at + 20, number * 100)
        steps[number * 100] = at + 20
    return run_objects([life.life], steps=steps)


async def put(store: StoreWriter, run: str, objects: Objects) -> None:
    for key, (body, _) in objects.items():
        await store.put(run + key, body)


def write(folder: Path, run: str, objects: Objects) -> None:
    """Write them as files, where a destination is a directory."""
    for key, (body, at) in objects.items():
        path = folder / run / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
        os.utime(path, (at, at))
