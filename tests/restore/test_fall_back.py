"""A snapshot with which starts fail again and again is passed over: the one before is restored, and nothing is lost."""

import errno
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.core.noted_lives import NotedLife
from tests.fakes.fake_store import FakeStore
from tests.restore.restored_snapshots import base_of, keep_base, restored
from tests.restore.restored_volume import content
from tests.restore.stored_checkpoints import truncate
from tests.restore.stored_snapshots import StoredSnapshot, store_snapshot

from keepstep_agent.adapters.output.mirror_state import write_announced
from keepstep_agent.adapters.volume.shared_volume import Folder
from keepstep_agent.catalog.damage import clear_damage, damaged_saves, passed_over, read_damage
from keepstep_agent.catalog.markers import list_snapshots
from keepstep_agent.core.errors import ErrorKind, VolumeError
from keepstep_agent.core.stored.ledger import AgentEnded, Resumed, encode_life
from keepstep_agent.core.stored.object_layout import file_key, ledger_key

FAILED = (
    "starts in a row that resumed from it have failed within a minute; it stays, and --fall-back-after 0 takes it again"
)


class Run:
    """Three snapshots, and starts that fail with what they resume from."""

    def __init__(self, store: FakeStore) -> None:
        self.store = store
        self.starts = 0

    async def begin(self) -> list[StoredSnapshot]:
        return [
            await store_snapshot(
                self.store, number, {f"out/ckpt-{number}/w": b"w%d" % number, "out/log": b"l" * number}
            )
            for number in (1, 2, 3)
        ]

    async def fails(self, save: str, starts: int, *, early: bool = True) -> None:
        for _ in range(starts):
            self.starts += 1
            life = NotedLife(f"agent-{self.starts}")
            life.start(100.0 * self.starts, resumed=Resumed.SAVE, save=save)
            life.add(AgentEnded, 100.0 * self.starts + 5, code=0, program_failed=True, failed_early=early)
            await self.store.put(ledger_key("", 100.0 * self.starts + 5, life.agent), encode_life(life.life))

    async def restores(self, volume: Path, *, after: int = 3) -> int:
        """Return the number of the snapshot."""
        found = await restored(self.store, volume, fall_back_after=after)
        return found.snapshots[0].number


@pytest.fixture
async def job(store: FakeStore) -> Run:
    job = Run(store)
    await job.begin()
    return job


async def test_on_new_machines_the_one_before_comes_after_three_failed_starts(job: Run, tmp_path: Path) -> None:
    await job.fails("node-0-3", 2)
    assert await job.restores(tmp_path / "a") == 3
    await job.fails("node-0-3", 1)
    found = await restored(job.store, tmp_path / "b", fall_back_after=3)
    assert found.snapshots[0].number == 2
    assert found.skipped == (f"snapshot node-0-3: 3 {FAILED}",)
    assert content(tmp_path / "b" / "out") == {"ckpt-2/w": b"w2", "log": b"ll"}
    # It stays so, whatever becomes of the next starts.
    await job.fails("node-0-2", 1, early=False)
    assert await job.restores(tmp_path / "c") == 2


async def test_each_snapshot_has_its_own_three_starts_and_the_newest_comes_again_if_none_is_left(
    job: Run, tmp_path: Path
) -> None:
    await job.fails("node-0-3", 3)
    assert await job.restores(tmp_path / "a") == 2
    await job.fails("node-0-2", 2)
    assert await job.restores(tmp_path / "b") == 2
    await job.fails("node-0-2", 1)
    assert await job.restores(tmp_path / "c") == 1
    await job.fails("node-0-1", 3)
    assert await job.restores(tmp_path / "d") == 3


async def test_what_was_passed_over_is_noted_until_it_is_pruned_and_comes_again_if_asked_for(
    job: Run, tmp_path: Path
) -> None:
    await job.fails("node-0-3", 3)
    await job.restores(tmp_path / "a")
    assert await damaged_saves(job.store) == {"node-0-3"}
    assert await read_damage(job.store, "node-0-3") == f"3 {FAILED}"
    # Its bytes are good, which is not what was wrong.
    await clear_damage(job.store, "node-0-3")
    assert await damaged_saves(job.store) == {"node-0-3"}
    assert await job.restores(tmp_path / "b", after=0) == 3


async def test_where_no_other_can_be_restored_it_is_better_than_nothing(job: Run, tmp_path: Path) -> None:
    stored = await Run(job.store).begin()
    for one in stored[:2]:
        await truncate(job.store, file_key(one.info, f"out/ckpt-{one.info.step}/w"))
    await job.fails("node-0-3", 3)
    assert await job.restores(tmp_path / "a") == 3


async def test_a_ledger_that_cannot_be_read_passes_nothing_over(job: Run, tmp_path: Path) -> None:
    await job.fails("node-0-3", 3)
    for key in [key for key in job.store.objects if "/ledger/" in key]:
        job.store.objects[key].body = b"{"
    assert await job.restores(tmp_path / "a") == 3


async def test_on_the_same_volume_the_older_one_takes_the_place_of_what_is_stored_and_all_else_stays(
    job: Run, volume: Path
) -> None:
    await job.restores(volume)
    out = volume / "out"
    # Another log, and an announced checkpoint.
    (out / "train.log").write_bytes(b"begun")
    (out / "announced-9").mkdir()
    (out / "announced-9" / "w").write_bytes(b"w9")
    write_announced(volume, volume / "state", frozenset({"out/announced-9"}))
    await job.fails("node-0-3", 3)
    assert await job.restores(volume) == 2
    expected = {"ckpt-2/w": b"w2", "log": b"ll", "train.log": b"begun", "announced-9/w": b"w9"}
    assert content(out) == expected
    assert not (out / "ckpt-3").exists()
    base = base_of(volume)
    assert base.snapshot is not None
    assert base.snapshot.save == "node-0-2"
    # Another start leaves it as it is, and one that asks for the newest gets that back.
    assert (await restored(job.store, volume, fall_back_after=3)).left == (out,)
    assert content(out) == expected
    assert await job.restores(volume, after=0) == 3
    assert content(out)["ckpt-3/w"] == b"w3"


async def test_a_log_that_the_older_one_has_too_is_kept_under_another_name(store: FakeStore, volume: Path) -> None:
    job = Run(store)
    for number in (1, 2):
        await store_snapshot(store, number, {f"out/ckpt-{number}": b"w", "out/train.log": b"l" * number})
    await job.restores(volume)
    (volume / "out" / "train.log").write_bytes(b"all of it")
    await job.fails("node-0-2", 3)
    assert await job.restores(volume) == 1
    assert content(volume / "out") == {"ckpt-1": b"w", "train.log": b"l", "train.log.before-restore": b"all of it"}


@pytest.mark.parametrize("stray", ["ckpt-4/w", "ckpt-3/w", "link"])
async def test_on_the_same_volume_nothing_is_replaced_if_no_snapshot_has_all_that_is_there(
    stray: str, job: Run, volume: Path
) -> None:
    await job.restores(volume)
    (volume / "out" / stray).parent.mkdir(exist_ok=True)
    if stray == "link":
        (volume / "out" / stray).symlink_to("/usr")
    else:
        (volume / "out" / stray).write_bytes(b"half")
    before = sorted((volume / "out").rglob("*"))
    await job.fails("node-0-3", 3)
    found = await restored(job.store, volume, fall_back_after=3)
    assert sorted((volume / "out").rglob("*")) == before
    assert found.left == (volume / "out",)
    (warning,) = found.warnings
    assert f"no snapshot has {volume}/out/{stray}: " not in warning
    assert f"no snapshot has {volume}/out/{stray};" in warning


async def test_what_is_in_the_way_of_the_older_one_leaves_all_as_it_is(store: FakeStore, volume: Path) -> None:
    job = Run(store)
    await store_snapshot(store, 1, {"out/last/w": b"1"})
    await store_snapshot(store, 2, {"out/last": b"2"})
    await job.restores(volume)
    await job.fails("node-0-2", 3)
    found = await restored(job.store, volume, fall_back_after=3)
    assert content(volume / "out") == {"last": b"2"}
    assert [warning for warning in found.warnings if "the one before it is not restored" in warning]


async def test_a_directory_that_the_snapshot_does_not_have_is_left_alone(job: Run, volume: Path) -> None:
    await job.restores(volume)
    (volume / "mine").mkdir()
    (volume / "mine" / "thesis.tex").write_bytes(b"t")
    await job.fails("node-0-3", 3)
    found = await restored(job.store, volume, [volume / "out", volume / "mine"], fall_back_after=3)
    assert found.snapshots[0].number == 2
    assert content(volume / "mine") == {"thesis.tex": b"t"}


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("change", range(1, 9))
async def test_interrupted_at_any_change_the_next_restore_completes_it(
    change: int, after: int, job: Run, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await job.restores(volume)
    await job.fails("node-0-3", 3)
    changes = 0
    for name in ("rename", "unlink", "remove_if_empty"):
        original = getattr(Folder, name)

        def counted(folder: Folder, *arguments: Any, original: Any = original, **options: Any) -> Any:
            nonlocal changes
            changes += 1
            if changes == change:
                raise OSError(errno.EIO, "the machine is gone")
            return original(folder, *arguments, **options)

        monkeypatch.setattr(Folder, name, counted)
    with suppress(VolumeError):
        await job.restores(volume)
    monkeypatch.undo()
    if await job.restores(volume, after=after) == 2:
        assert content(volume / "out") == {"ckpt-2/w": b"w2", "log": b"ll"}
        assert {path.name for path in (volume / "out").iterdir()} == {"ckpt-2", "log"}
    else:
        # What was in place of the older one already may lie beside it.
        assert after == 0
        assert content(volume / "out").items() >= {"ckpt-3/w": b"w3", "log": b"lll"}.items()


async def test_what_has_taken_the_place_of_a_link_meanwhile_stays(store: FakeStore, volume: Path) -> None:
    job = Run(store)
    await store_snapshot(store, 1, {"out/ckpt-1": b"1"})
    await store_snapshot(store, 2, {"out/ckpt-2": b"2"}, links={"out/last": "ckpt-2"})
    await job.restores(volume)
    await job.fails("node-0-2", 3)
    # Interrupted before anything was removed.
    keep_base(volume, snapshot=None)
    (volume / "out" / "last").unlink()
    (volume / "out" / "last").write_bytes(b"mine")
    assert await job.restores(volume) == 1
    assert content(volume / "out") == {"ckpt-1": b"1", "last": b"mine"}


async def test_other_nodes_take_none_that_its_own_node_passes_over(job: Run, tmp_path: Path) -> None:
    await job.fails("node-0-3", 3)
    await job.restores(tmp_path / "a")
    found = await restored(job.store, tmp_path / "b", node_rank=1, fall_back_after=3)
    assert [one.number for one in found.snapshots] == [2]


@pytest.mark.parametrize("kind", [ErrorKind.ACCESS_DENIED, ErrorKind.UNREACHABLE])
async def test_a_store_that_does_not_tell_passes_nothing_over(kind: ErrorKind, job: Run) -> None:
    await job.fails("node-0-3", 3)
    snapshots = await list_snapshots(job.store)
    for method in ("list", "get"):
        job.store.fail(method, kind, times=3)
        assert await passed_over(job.store, snapshots, node_rank=0, after=3) == {}
        job.store._failures.clear()
    assert list(await passed_over(job.store, snapshots, node_rank=0, after=3)) == ["node-0-3"]
