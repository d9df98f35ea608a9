"""The init step against real servers with a network between that breaks."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.restore.one_output import restore
from tests.restore.restored_volume import content
from tests.restore.stored_checkpoints import all_files, store_checkpoint
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Rule
from tests.servers.server import Bucket

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.adapters.retrying_store import RetryingStore, RetryPolicy
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.settings.values import StoreSettings
from keepstep_agent.restore.init_step import Restored

NOT_FOUND_PAGE = b"<html><head><title>404 Not Found</title></head><body><center>nginx</center></body></html>"
PATIENCE = RetryPolicy(attempts=4, first_wait_seconds=0.05)


async def run(settings: StoreSettings, volume: Path, *, attempt: str = "", node_rank: int = 0) -> Restored | None:
    async with open_store(settings) as store:
        return await restore(
            RetryingStore(store, PATIENCE),
            checkpoint_directory=volume / "checkpoints",
            volume=volume,
            state_directory=volume / ".keepstep" / "agent",
            attempt=attempt,
            node_rank=node_rank,
        )


async def fill(settings: StoreSettings, *steps: int) -> None:
    async with open_store(settings) as store:
        for step in steps:
            await store_checkpoint(store, step)


async def test_cut_connections_refusals_and_flipped_bits_on_the_way_cost_nothing_but_a_second_request(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, volume: Path
) -> None:
    await fill(rclone_bucket.settings(), 100, 200)
    for rule in (
        Rule(name="reset", fault=Fault.RESET_RESPONSE, method="GET", target="model-0", after_bytes=20_000),
        Rule(name="end", fault=Fault.END_RESPONSE, method="GET", target="model-0", after_bytes=30_000),
        Rule(name="flip", fault=Fault.FLIP_RESPONSE, method="GET", target="model-0", after_bytes=40_000),
        Rule(name="busy", fault=Fault.STATUS, method="GET", target="optimizer", status=503),
        Rule(name="listing", fault=Fault.STATUS, method="GET", target="list-type", status=500),
    ):
        fault_proxy.add(rule)
    restored = await run(rclone_bucket.settings(endpoint_url=fault_proxy.endpoint_url), volume)
    assert restored is not None
    assert (restored.step, restored.skipped) == (200, ())
    assert content(restored.path) == all_files(200)
    assert [fault_proxy.hits(name) for name in ("reset", "end", "flip", "busy", "listing")] == [1] * 5


@pytest.mark.parametrize(
    "target", ["list-type=2", "/999999999799.0123abcd", "manifest-00000-00001.json", "model-0", "resume/job-1"]
)
async def test_a_404_that_a_gateway_gives_never_makes_it_take_an_older_checkpoint(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, volume: Path, target: str
) -> None:
    await fill(rclone_bucket.settings(), 100, 200)
    gateway = Rule(name="gateway", fault=Fault.STATUS, target=target, status=404, body=NOT_FOUND_PAGE, times=-1)
    fault_proxy.add(gateway)
    settings = rclone_bucket.settings(endpoint_url=fault_proxy.endpoint_url)

    with pytest.raises(StoreError) as caught:
        await run(settings, volume, attempt="job-1")
    assert caught.value.kind is ErrorKind.STORE_FAILED
    fault_proxy.clear()
    fault_proxy.add(replace(gateway, times=2))
    restored = await run(settings, volume, attempt="job-1")

    assert restored is not None
    assert (restored.step, restored.skipped) == (200, ())
    assert fault_proxy.hits("gateway") >= PATIENCE.attempts + 2


async def test_a_store_that_goes_away_midway_is_an_error_and_nothing_is_half_made(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, volume: Path
) -> None:
    await fill(rclone_bucket.settings(), 100, 200)
    fault_proxy.add(Rule(name="gone", fault=Fault.RESET_RESPONSE, method="GET", target="model-0", times=-1))
    with pytest.raises(StoreError) as caught:
        await run(rclone_bucket.settings(endpoint_url=fault_proxy.endpoint_url), volume)
    assert caught.value.kind is ErrorKind.UNREACHABLE
    assert not list((volume / "checkpoints").iterdir())
    assert not list((volume / ".keepstep" / "incoming").iterdir())


@pytest.mark.nightly
async def test_pods_that_start_together_agree_on_ceph(ceph_bucket: Bucket, tmp_path: Path) -> None:
    await fill(ceph_bucket.settings(), 100, 200)
    async with asyncio.timeout(HANG_SECONDS):
        restored = await asyncio.gather(
            *(
                run(ceph_bucket.settings(), tmp_path / f"pod-{rank}", attempt="job-1", node_rank=rank)
                for rank in range(1, 4)
            )
        )
    assert [one.step if one else None for one in restored] == [200] * 3
