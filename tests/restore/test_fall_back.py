"""A snapshot with which starts fail again and again is passed over: the one before is restored, and nothing is lost."""

from pathlib import Path

import pytest
from tests.core.noted_lives import NotedLife
from tests.fakes.fake_store import FakeStore
from tests.restore.restored_snapshots import base_of, restored
from tests.restore.restored_volume import content
from tests.restore.stored_checkpoints import truncate
from tests.restore.stored_snapshots import StoredSnapshot, store_snapshot

from keepstep_agent.adapters.output.mirror_state import write_announced
from keepstep_agent.catalog.damage import clear_damage, damaged_saves, read_damage
from keepstep_agent.core.errors import ErrorKind
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
    # Written by the failing starts, and by nobody else; and an announced checkpoint.
    (out / "log").write_bytes(b"lll and more")
    (out / "ckpt-4").mkdir()
    (out / "ckpt-4" / "w").write_bytes(b"half")
    (out / "announced-9").mkdir()
    (out / "announced-9" / "w").write_bytes(b"w9")
    write_announced(volume, volume / "state", frozenset({"out/announced-9"}))
    await job.fails("node-0-3", 3)
    found = await restored(job.store, volume, fall_back_after=3)
    expected = {
        "ckpt-2/w": b"w2",
        "log": b"ll",
        "log.before-restore": b"lll and more",
        "ckpt-4.before-restore/w": b"half",
        "announced-9/w": b"w9",
    }
    assert content(out) == expected
    assert found.snapshots[0].number == 2
    assert [warning for warning in found.warnings if "ckpt-4.before-restore" in warning]
    base = base_of(volume)
    assert base.snapshot is not None
    assert base.snapshot.save == "node-0-2"
    # Another start leaves it as it is, and one that asks for the newest gets that back.
    assert (await restored(job.store, volume, fall_back_after=3)).left == (out,)
    assert content(out) == expected
    assert await job.restores(volume, after=0) == 3
    assert content(out)["ckpt-3/w"] == b"w3"


async def test_an_interrupted_fall_back_is_done_again(job: Run, volume: Path) -> None:
    await job.restores(volume)
    await job.fails("node-0-3", 3)
    job.store.fail("put", ErrorKind.UNREACHABLE)
    assert await job.restores(volume) == 2
    assert content(volume / "out") == {"ckpt-2/w": b"w2", "log": b"ll"}
