"""Buckets with Object Lock or a retention policy, as AWS, as stores without CRC headers, and as those that say no."""

import json
import secrets
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tests.catalog.stored_snapshots import output, store_snapshot
from tests.catalog.test_ledger import by_agent, many, note
from tests.harness.agent_process import AgentProcess, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.harness.warm_python import keepstep
from tests.restore.stored_checkpoints import store_checkpoint
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Rule
from tests.servers.moto import MotoServer
from tests.servers.server import Bucket, make_client

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.catalog.deep_check import check
from keepstep_agent.catalog.ledger import merge_ledger, read_ledger
from keepstep_agent.catalog.markers import list_committed, list_snapshots
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.stored.object_layout import LEDGER_PREFIX
from keepstep_agent.doctor import Verdict, examine

_MIB = 1024**2
_WANTS = {Fault.OBJECT_LOCK: "crc64nvme", Fault.OBJECT_LOCK_MD5: "md5"}
_PROTECTED = [
    (403, "AccessDenied", "Access Denied because object protected by object lock."),
    (403, "RetentionPolicyNotMet", "The bucket's policy lets nobody delete it yet."),
    (400, "InvalidRequest", "Object is WORM protected and cannot be overwritten"),
]


def refusal(status: int, code: str, text: str, *, method: str, target: str = "") -> Rule:
    body = f"<Error><Code>{code}</Code><Message>{text}</Message></Error>".encode()
    return Rule(name="protected", fault=Fault.STATUS, times=-1, method=method, target=target, status=status, body=body)


@pytest.fixture
def proxy(moto_server: MotoServer) -> Iterator[FaultProxy]:
    proxy = FaultProxy(moto_server.port)
    try:
        proxy.start()
        yield proxy
    finally:
        proxy.stop()


@pytest.fixture
def locked_bucket(moto_server: MotoServer, proxy: FaultProxy, s3_environment: None) -> Bucket:
    """A bucket whose versions nobody may delete for a day, behind a proxy. moto wants Content-MD5 for its writes."""
    client = make_client(moto_server.endpoint_url, None)
    name = f"locked-{secrets.token_hex(8)}"
    client.create_bucket(Bucket=name, ObjectLockEnabledForBucket=True)
    lock = {"ObjectLockEnabled": "Enabled", "Rule": {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 1}}}
    client.put_object_lock_configuration(Bucket=name, ObjectLockConfiguration=lock)
    return Bucket(name=name, prefix="runs/one", endpoint_url=proxy.endpoint_url, ca_bundle=None)


@pytest.mark.parametrize("fault", _WANTS)
async def test_the_doctor_passes_a_bucket_that_wants_a_checksum_with_every_write(
    fault: Fault, locked_bucket: Bucket, proxy: FaultProxy
) -> None:
    proxy.add(Rule(name="lock", fault=fault, method="PUT", times=-1))

    found = {one.name: one async for one in examine(locked_bucket.settings())}

    assert not [one for one in found.values() if one.verdict is Verdict.FAIL]
    assert found["conditional writes"].verdict is Verdict.OK
    assert {"multipart", "download"} <= found.keys()
    async with open_store(locked_bucket.settings()) as store:
        assert (await store.probe()).integrity == _WANTS[fault]


@pytest.mark.parametrize("fault", _WANTS)
def test_a_run_commits_and_prunes_in_a_bucket_with_object_lock(
    fault: Fault, locked_bucket: Bucket, proxy: FaultProxy, tmp_path: Path
) -> None:
    proxy.add(Rule(name="lock", fault=fault, method="PUT", times=-1))
    settings: dict[str, Any] = {"endpoint_url": proxy.endpoint_url, "keep_last": 1}
    with AgentProcess(tmp_path / "volume", locked_bucket.destination, **settings) as agent:
        for step in (1, 2):
            # Parts, one object, a pack, and an empty file.
            files = {"model.bin": 17 * _MIB, "state.pt": 3 * _MIB, "a.json": 10, "b.json": 10, "empty": 0}
            path = write_checkpoint(agent.checkpoints / f"checkpoint-{step}", files)
            agent.wait_committed(agent.announce(path, step).save)
        wait_until(lambda: bool(agent.log("retention.pruned")), HANG_SECONDS, "the first one is pruned")
    listed = keepstep("ls", locked_bucket.destination, "--json", "--endpoint-url", proxy.endpoint_url)
    assert [one["step"] for one in json.loads(listed.stdout)["checkpoints"]] == [2]
    verified = keepstep("verify", locked_bucket.destination, "--endpoint-url", proxy.endpoint_url)
    assert verified.returncode == 0, verified.stderr
    # What was deleted has a delete marker before it, and its versions stay until their lock ends.
    versions = locked_bucket.client().list_object_versions(Bucket=locked_bucket.name)
    assert [one for one in versions["Versions"] if "checkpoint-1/" in one["Key"]]
    assert [one for one in versions["DeleteMarkers"] if "checkpoint-1/" in one["Key"]]


async def test_a_store_that_refuses_every_write_is_not_one_without_conditions(
    locked_bucket: Bucket, proxy: FaultProxy
) -> None:
    proxy.add(refusal(400, "InvalidStorageClass", "There is no such class", method="PUT"))
    async with open_store(locked_bucket.settings()) as store:
        with pytest.raises(StoreError, match="InvalidStorageClass") as caught:
            await store.probe()
    assert caught.value.kind is ErrorKind.REQUEST_REFUSED


async def test_a_bucket_that_asks_for_checksums_only_later_is_told_from_a_locked_object(
    locked_bucket: Bucket, proxy: FaultProxy
) -> None:
    text = "Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object requests with Object Lock parameters"
    proxy.add(refusal(400, "InvalidRequest", text, method="PUT"))
    async with open_store(locked_bucket.settings()) as store:
        with pytest.raises(StoreError) as caught:
            await store.put("a", b"a")
    assert caught.value.kind is ErrorKind.REQUEST_REFUSED
    assert "start the agent again" in caught.value.hint


@pytest.mark.parametrize("answer", _PROTECTED, ids=[code for _, code, _ in _PROTECTED])
async def test_prune_shows_what_the_stores_own_retention_protects_and_deletes_the_rest(
    answer: tuple[int, str, str], locked_bucket: Bucket, proxy: FaultProxy
) -> None:
    async with open_store(locked_bucket.settings()) as store:
        for step in (1, 2, 3, 4):
            await store_checkpoint(store, step, ranks=[{"model.pt": b"m"}])
    proxy.add(refusal(*answer, method="DELETE", target="0123abcd-000002"))

    command = ("prune", locked_bucket.destination, "--keep-last", "1", "--endpoint-url", proxy.endpoint_url)
    pruned = keepstep(*command, "--yes", "--json")

    assert pruned.returncode == 0, pruned.stderr
    said = json.loads(pruned.stdout)
    assert [one["save"] for one in said["deleted"]] == ["0123abcd-000001", "0123abcd-000003"]
    assert {one["save"]: one["reason"] for one in said["kept"]} == {
        "0123abcd-000004": "newest 1",
        "0123abcd-000002": "the store's retention protects it",
    }
    async with open_store(locked_bucket.settings()) as store:
        assert [one.step for one in await list_committed(store)] == [4, 2]
    proxy.clear()
    assert [one["save"] for one in json.loads(keepstep(*command, "--yes", "--json").stdout)["deleted"]] == [
        "0123abcd-000002"
    ]


async def test_prune_stops_at_the_first_protected_snapshot_and_shows_what_has_a_marker_as_kept(
    locked_bucket: Bucket, proxy: FaultProxy
) -> None:
    async with open_store(locked_bucket.settings()) as store:
        base = None
        for number in (1, 2, 3, 4):
            base = await store_snapshot(store, number, output(a=1, b=number), base=base)
    proxy.add(refusal(*_PROTECTED[0], method="DELETE", target="0123abcd-000002.json"))

    command = ("prune", locked_bucket.destination, "--keep-last", "1", "--endpoint-url", proxy.endpoint_url)
    pruned = keepstep(*command, "--yes", "--json")

    assert pruned.returncode == 0, pruned.stderr
    said = json.loads(pruned.stdout)
    (deleted,) = said["deleted"]
    assert (deleted["save"], deleted["size_bytes"]) == ("0123abcd-000001", 0)
    assert "objects of it stay" in deleted["reason"]
    assert {one["save"]: one["reason"] for one in said["kept"]} == {
        "0123abcd-000004": "newest 1",
        "0123abcd-000003": "the store's retention protects a snapshot that may share its objects",
        "0123abcd-000002": "the store's retention protects it",
    }
    async with open_store(locked_bucket.settings()) as store:
        (snapshots,) = (await list_snapshots(store)).values()
        assert [one.step for one in snapshots] == [4, 3, 2]
        assert [await check(store, one) for one in snapshots] == [(), (), ()]


async def test_a_missing_right_to_delete_is_no_retention(locked_bucket: Bucket, proxy: FaultProxy) -> None:
    async with open_store(locked_bucket.settings()) as store:
        for step in (1, 2):
            await store_checkpoint(store, step, ranks=[{"model.pt": b"m"}])
    proxy.add(refusal(403, "AccessDenied", "Access Denied", method="DELETE"))
    command = ("prune", locked_bucket.destination, "--keep-last", "1", "--endpoint-url", proxy.endpoint_url)
    pruned = keepstep(*command, "--yes")
    assert pruned.returncode != 0
    assert "DeleteObject" in pruned.stderr


@pytest.mark.parametrize("answer", [*_PROTECTED, (403, "AccessDenied", "Access Denied")], ids=lambda answer: answer[2])
async def test_a_ledger_whose_objects_nobody_may_delete_is_merged_once(
    answer: tuple[int, str, str], locked_bucket: Bucket, proxy: FaultProxy
) -> None:
    proxy.add(refusal(*answer, method="DELETE"))
    async with open_store(locked_bucket.settings()) as store:
        noted = await note(store, many())
        found = []
        for _ in range(3):
            listed = [one async for one in store.list(LEDGER_PREFIX)]
            with nullcontext() if answer in _PROTECTED else pytest.raises(StoreError, match="DeleteObject"):
                assert await merge_ledger(store, listed, now=time.time() + 2 * 3600) == 0
            found.append(len(listed))
        assert found == [len(noted), len(noted) + 1, len(noted) + 1]
        assert by_agent((await read_ledger(store)).lives) == by_agent(many())


async def test_the_doctor_says_that_the_stores_retention_protects_what_is_deleted(
    locked_bucket: Bucket, proxy: FaultProxy
) -> None:
    proxy.add(refusal(*_PROTECTED[1], method="DELETE"))
    found = {one.name: one async for one in examine(locked_bucket.settings())}
    assert found["delete"].verdict is Verdict.WARN
    assert "when that ends" in found["delete"].hint
    assert found["conditional writes"].verdict is Verdict.OK
    assert not [one for one in found.values() if one.verdict is Verdict.FAIL]


async def test_the_doctor_fails_a_bucket_that_lets_nothing_be_replaced(
    locked_bucket: Bucket, proxy: FaultProxy
) -> None:
    first = Rule(name="first", fault=Fault.DELAY, method="PUT")
    proxy.add(first)
    proxy.add(refusal(*_PROTECTED[1], method="PUT"))
    found = {one.name: one async for one in examine(locked_bucket.settings())}
    assert found["put"].verdict is Verdict.FAIL
    assert "Object Lock" in found["put"].hint
