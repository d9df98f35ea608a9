"""Objects that a lifecycle rule has moved to an archive: the store lists them and refuses to give them."""

from collections.abc import AsyncIterator

import pytest
from tests.catalog.stored_snapshots import output, store_snapshot
from tests.core.listings import why_kept
from tests.restore.stored_checkpoints import store_checkpoint
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Rule
from tests.servers.server import Bucket

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.catalog.markers import list_committed, list_snapshots
from keepstep_agent.catalog.pruning import PruneReport, prune
from keepstep_agent.catalog.recent_pruning import prune_recent
from keepstep_agent.core.policies.retention.horizon import Horizon
from keepstep_agent.core.settings.values import RetentionSettings
from keepstep_agent.ports import ObjectStore


@pytest.fixture
async def store(proxied: Bucket) -> AsyncIterator[ObjectStore]:
    async with open_store(proxied.settings()) as store:
        yield store


def archive(proxy: FaultProxy, key: str) -> None:
    """Refuse to give the objects whose keys contain this text."""
    body = b"<Error><Code>InvalidObjectState</Code><Message>The object's storage class forbids it</Message></Error>"
    proxy.add(Rule(name="archived", fault=Fault.STATUS, method="GET", target=key, status=403, body=body, times=-1))


async def pruned(store: ObjectStore, *, whole: bool, keep_final: bool = True) -> PruneReport:
    keep = RetentionSettings(keep_last=1, keep_final=keep_final)
    now = 4_000_000_000.0
    report = (
        await prune(store, keep, now=now) if whole else await prune_recent(store, keep, Horizon(), series={""}, now=now)
    )
    assert report is not None
    return report


@pytest.mark.parametrize("whole", [True, False])
async def test_a_save_whose_marker_is_archived_is_kept_and_the_others_are_pruned(
    whole: bool, store: ObjectStore, fault_proxy: FaultProxy
) -> None:
    for step in (1, 2, 3):
        await store_checkpoint(store, step, ranks=[{"model.pt": b"m"}])
    archive(fault_proxy, "0123abcd-000001.json")
    report = await pruned(store, whole=whole)
    assert [one.step for one in await list_committed(store)] == [3, 1]
    reason = why_kept(report.plan)["0123abcd-000001"]
    assert reason.startswith("it may be final" if whole else "its marker does not say where its objects are")


@pytest.mark.parametrize("whole", [True, False])
async def test_a_newest_save_whose_marker_is_archived_justifies_no_deletion(
    whole: bool, store: ObjectStore, fault_proxy: FaultProxy
) -> None:
    for step in (1, 2, 3):
        await store_checkpoint(store, step, ranks=[{"model.pt": b"m"}])
    archive(fault_proxy, "0123abcd-000003.json")
    await pruned(store, whole=whole)
    assert [one.step for one in await list_committed(store)] == [3, 2]


@pytest.mark.parametrize("whole", [True, False])
async def test_of_saves_of_one_step_one_whose_marker_is_archived_counts_by_the_stores_clock(
    whole: bool, store: ObjectStore, fault_proxy: FaultProxy
) -> None:
    await store_checkpoint(store, 1, save="0123abcd-000002", saved_at=100.0, ranks=[{"model.pt": b"m"}])
    await store_checkpoint(store, 1, save="0123abcd-000001", ranks=[{"model.pt": b"m"}])
    archive(fault_proxy, "0123abcd-000001.json")
    await pruned(store, whole=whole, keep_final=False)
    assert "0123abcd-000001" in {one.save for one in await list_committed(store)}


async def test_while_a_manifest_is_archived_the_snapshots_stay_and_checkpoints_are_pruned(
    store: ObjectStore, fault_proxy: FaultProxy
) -> None:
    base = None
    for number in (1, 2, 3, 4):
        base = await store_snapshot(store, number, output(a=1, b=number), base=base)
    for step in (1, 2):
        await store_checkpoint(store, step, ranks=[{"model.pt": b"m"}])
    archive(fault_proxy, "node-0/0123abcd-000004/.keepstep/manifest")
    report = await pruned(store, whole=True)
    assert [one.step for one in await list_committed(store)] == [2]
    (snapshots,) = (await list_snapshots(store)).values()
    assert [one.step for one in snapshots] == [4, 3, 2, 1]
    assert report.plan.deletions
