"""What a listing of a destination shows, and the verdict over it, for tests of retention."""

from collections.abc import Sequence
from typing import Any

from keepstep_agent.core.model import SnapshotId
from keepstep_agent.core.policies.restore_choice import CommittedSave
from keepstep_agent.core.policies.retention.deletions import PrunePlan, StoredSave
from keepstep_agent.core.policies.retention.verdict import plan_prune
from keepstep_agent.core.settings.values import RetentionSettings
from keepstep_agent.core.stored.object_layout import snapshot_key, step_prefix

NOW = 1_000_000.0
DAY = 24 * 3600.0


def committed(step: int, save: str = "", modified_at: float = NOW - 3 * DAY) -> CommittedSave:
    save = save or f"aaaaaaaa-{step:06d}"
    return CommittedSave(key=f"{step_prefix(step)}{save}.json", step=step, save=save, modified_at=modified_at)


def stored(step: int, save: str = "", modified_at: float = NOW - 5 * DAY, *, manifest: bool = True) -> StoredSave:
    name, save = f"checkpoint-{step}", save or f"aaaaaaaa-{step:06d}"
    keys = [f"{name}/{save}/model.pt"] + [f"{name}/{save}/.keepstep/manifest-00000-00001.json"] * manifest
    return StoredSave(name=name, save=save, sizes_bytes=dict.fromkeys(keys, 5), modified_at=modified_at)


def plan(
    found: Sequence[CommittedSave],
    data: Sequence[StoredSave] | None = None,
    *,
    keep_last: int = 1,
    every: int = 0,
    settings: RetentionSettings | None = None,
    **changes: Any,
) -> PrunePlan:
    values: dict[str, Any] = {
        "validated": [one.save for one in found],
        "damaged": (),
        "protected": (),
        "live": (),
        "known": (),
        "now": NOW,
    }
    return plan_prune(
        found,
        [stored(one.step, one.save) for one in found] if data is None else data,
        settings or RetentionSettings(keep_last=keep_last, keep_every_steps=every),
        **(values | changes),
    )


def deleted(result: PrunePlan) -> set[str]:
    return {one.save for one in result.deletions}


def ids(*steps: int) -> set[str]:
    return {f"aaaaaaaa-{step:06d}" for step in steps}


def why_kept(result: PrunePlan) -> dict[str, str]:
    return {one.save: one.reason for one in result.kept}


def snapshot(number: int, series: str = "node-0", modified_at: float = NOW - 3 * DAY) -> CommittedSave:
    save = f"{series[-1] * 8}-{number:06d}"
    key = snapshot_key(SnapshotId(series=series, number=number, save=save))
    return CommittedSave(key=key, step=number, save=save, series=series, modified_at=modified_at)


def folder(one: CommittedSave, *files: str, modified_at: float = NOW - 5 * DAY, reserves: bool = True) -> StoredSave:
    """What is stored of a snapshot: ten bytes for each file, and one for the others."""
    prefix = f"{one.series}/{one.save}"
    sizes_bytes = {f"{prefix}/{file}": 10 for file in files} | {f"{prefix}/.keepstep/manifest-00000-00001.json": 1}
    sizes_bytes |= {f"{prefix}/.keepstep/base.json": 1} if reserves else {}
    return StoredSave(name=one.series, save=one.save, sizes_bytes=sizes_bytes, modified_at=modified_at)
