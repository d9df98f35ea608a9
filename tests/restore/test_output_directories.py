"""Each output directory has a newest checkpoint, which comes back where it was saved."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.fake_store import FakeStore
from tests.restore.restored_volume import content
from tests.restore.stored_checkpoints import all_files, flip_byte, store_checkpoint

from keepstep_agent.catalog.markers import list_committed
from keepstep_agent.catalog.pruning import prune
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.policies.restore_choice import by_line
from keepstep_agent.core.settings.values import RetentionSettings
from keepstep_agent.core.stored.object_layout import file_key
from keepstep_agent.restore.init_step import restore
from keepstep_agent.restore.local_copy import LocalCopies
from keepstep_api.records import record_file


async def run(store: FakeStore, volume: Path, **keywords: Any) -> list[tuple[str, int]]:
    """Where what was restored lies below the volume, and its step."""
    restored = await restore(
        store,
        checkpoint_directory=volume / "checkpoints",
        volume=volume,
        state_directory=volume / ".keepstep" / "agent",
        **keywords,
    )
    return [(one.path.relative_to(volume).as_posix(), one.step) for one in restored]


async def store_two_folds(store: FakeStore) -> None:
    for step in (4, 8):
        await store_checkpoint(store, step, save=f"a-{step}", directory="runs/fold0", saved_at=step)
    await store_checkpoint(store, 2, save="b-2", directory="runs/fold1", saved_at=10)


async def test_the_newest_of_each_comes_back_where_it_was_saved(store: FakeStore, tmp_path: Path) -> None:
    await store_two_folds(store)
    await store_checkpoint(store, 1, saved_at=20)
    assert await run(store, tmp_path) == [
        ("checkpoints/checkpoint-1", 1),
        ("runs/fold1/checkpoint-2", 2),
        ("runs/fold0/checkpoint-8", 8),
    ]
    assert content(tmp_path / "runs/fold0/checkpoint-8") == all_files(8)
    assert content(tmp_path / "runs/fold1/checkpoint-2") == all_files(2)


async def test_checkpoints_of_one_name_have_a_place_and_a_record_each(store: FakeStore, tmp_path: Path) -> None:
    for number in range(2):
        directory = f"fold{number}"
        await store_checkpoint(store, 8, save=f"{number}-8", directory=directory, ranks=[{"state": b"%d" % number}])
    await run(store, tmp_path)
    for number in range(2):
        assert content(tmp_path / f"fold{number}/checkpoint-8") == {"state": b"%d" % number}
        record = tmp_path / ".keepstep" / "records" / record_file(f"fold{number}", "checkpoint-8")
        assert json.loads(record.read_text())["save"] == f"{number}-8"


async def test_damage_falls_back_within_the_output_directory_alone(store: FakeStore, tmp_path: Path) -> None:
    await store_two_folds(store)
    damaged = await store_checkpoint(store, 9, save="a-9", directory="runs/fold0")
    await flip_byte(store, file_key(damaged, "model-0.safetensors"), 5)
    assert sorted(await run(store, tmp_path)) == [("runs/fold0/checkpoint-8", 8), ("runs/fold1/checkpoint-2", 2)]


async def test_an_output_directory_that_has_only_damaged_ones_is_no_fresh_start(
    store: FakeStore, tmp_path: Path
) -> None:
    await store_two_folds(store)
    damaged = await store_checkpoint(store, 9, save="c-9", directory="runs/fold2")
    await flip_byte(store, file_key(damaged, "model-0.safetensors"), 5)
    with pytest.raises(StoreError) as caught:
        await run(store, tmp_path)
    assert caught.value.kind is ErrorKind.CHECKPOINT_CORRUPT


async def test_numbered_folders_of_one_output_directory_have_one_newest(store: FakeStore, tmp_path: Path) -> None:
    for start in range(3):
        directory = f"logs/version_{start}/checkpoints"
        await store_checkpoint(store, 10 + start, save=f"s-{start}", directory=directory, output="logs")
    assert await run(store, tmp_path) == [("logs/version_2/checkpoints/checkpoint-12", 12)]


async def test_all_pods_of_a_start_get_the_same_of_each(store: FakeStore, tmp_path: Path) -> None:
    await store_two_folds(store)
    first = await run(store, tmp_path / "a", attempt="job", place="0")
    # The same run goes on, which is no other start.
    await store_checkpoint(store, 12, save="b-12", directory="runs/fold1")
    assert await run(store, tmp_path / "b", attempt="job", place="1") == first


async def test_a_restore_that_was_killed_gives_a_checkpoint_its_place_back(
    store: FakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store_two_folds(store)
    await run(store, tmp_path)
    (tmp_path / "runs/fold0/checkpoint-8/mine.txt").write_text("mine")
    (tmp_path / "runs/fold0/checkpoint-8/model-0.safetensors").write_bytes(b"changed")

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(LocalCopies, "record", die)
        with pytest.raises(KeyboardInterrupt):
            await run(store, tmp_path)
    await run(store, tmp_path)
    assert content(tmp_path / "runs/fold0/checkpoint-8") == {**all_files(8), "mine.txt": b"mine"}
    assert not list((tmp_path / ".keepstep" / "replaced").iterdir())


async def test_retention_judges_each_by_itself(store: FakeStore) -> None:
    for directory, save in (("runs/fold0", "a"), ("runs/fold1", "b")):
        for step in (4, 8, 12):
            base = 0 if save == "a" else -3
            await store_checkpoint(store, step + base, save=f"{save}-{step}", directory=directory)
    report = await prune(store, RetentionSettings(keep_last=1), now=store.now)
    assert sorted(one.save for one in report.plan.deletions) == ["a-4", "a-8", "b-4", "b-8"]
    left = by_line(await list_committed(store)).values()
    assert sorted(one.save for found in left for one in found) == ["a-12", "b-12"]


@pytest.mark.parametrize("directory", ["../outside", "/etc", ".keepstep/agent", "a//b", "a/../b", "new\nline"])
async def test_a_marker_whose_directory_leads_elsewhere_is_damage(
    directory: str, store: FakeStore, tmp_path: Path
) -> None:
    await store_checkpoint(store, 5, directory=directory)
    with pytest.raises(StoreError) as caught:
        await run(store, tmp_path)
    assert caught.value.kind is ErrorKind.CHECKPOINT_CORRUPT
