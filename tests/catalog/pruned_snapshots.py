"""Chains of snapshots that share objects, prunes of them, and what those leave."""

from tests.catalog.stored_snapshots import output, store_snapshot
from tests.fakes.fake_store import FakeStore

from keepstep_agent.catalog.deep_check import check
from keepstep_agent.catalog.markers import list_snapshots
from keepstep_agent.catalog.pruning import PruneReport, prune
from keepstep_agent.catalog.recent_pruning import prune_recent
from keepstep_agent.core.model import RankManifest
from keepstep_agent.core.policies.retention.horizon import Horizon
from keepstep_agent.core.settings.values import RetentionSettings
from keepstep_agent.core.stored.object_layout import PRUNED_PREFIX

DAY = 24 * 3600.0


async def chain(store: FakeStore, count: int = 4, *, series: str = "node-0") -> list[RankManifest]:
    """`a` never changes, `b` at every second snapshot, `c` at each. A minute lies between them."""
    manifests: list[RankManifest] = []
    for number in range(1, count + 1):
        files = output(a=1, b=number // 2, c=number)
        base = manifests[-1] if manifests else None
        manifests.append(await store_snapshot(store, number, files, base=base, series=series))
        store.now += 60
    return manifests


async def pruned(store: FakeStore, keep_last: int = 1, **options: object) -> PruneReport:
    return await prune(store, RetentionSettings(keep_last=keep_last), now=store.now, **options)  # type: ignore[arg-type]


async def pruned_recent(store: FakeStore, keep_last: int = 1, *, series: str = "node-0") -> PruneReport:
    report = await prune_recent(
        store, RetentionSettings(keep_last=keep_last), Horizon(), series={series}, now=store.now
    )
    assert report is not None
    return report


async def left(store: FakeStore, series: str = "node-0") -> list[int]:
    """The numbers of the snapshots that are left, each of which is whole."""
    await all_are_whole(store)
    return [one.step for one in (await list_snapshots(store)).get(series, ())]


async def all_are_whole(store: FakeStore) -> None:
    for snapshots in (await list_snapshots(store)).values():
        for one in snapshots:
            assert await check(store, one) == ()


def objects_of(store: FakeStore, manifest: RankManifest) -> set[str]:
    """What is left in the folder of a snapshot."""
    prefix = f"{manifest.info.name}/{manifest.info.save}/"
    return {key.removeprefix(prefix) for key in store.objects if key.startswith(prefix)}


def tombstones(store: FakeStore) -> list[str]:
    return [key for key in store.objects if key.startswith(PRUNED_PREFIX)]


async def reserving(store: FakeStore, base: RankManifest, number: int = 9) -> RankManifest:
    """A snapshot in progress that shares what `base` consists of. It is not committed."""
    files = output(a=1, b=base.info.step // 2, c=base.info.step, d=9)
    return await store_snapshot(store, number, files, base=base, committed=False)
