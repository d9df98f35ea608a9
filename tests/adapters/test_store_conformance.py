"""One contract, every store: in memory, the filesystem, and real S3 servers from the weakest to Ceph.

A new store is one more kind, which the fixture `store` opens: docs/contributing/store.md.
"""

import os
import random
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.fake_store import FakeStore
from tests.fakes.memory_store import MemoryStore
from tests.harness.plain_transfer import PlainTransfer
from tests.lanes import nightly
from tests.regions import make_file, parts_of, region_of

from keepstep_agent.adapters.checksum import crc64nvme, region_checksum, region_md5
from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.adapters.rate_limit import RateLimiter
from keepstep_agent.adapters.s3.store import open_s3_store
from keepstep_agent.adapters.transfer.direct import DirectTransfer
from keepstep_agent.core.errors import ErrorKind, StoreError, VolumeError
from keepstep_agent.core.settings.values import MIB, StoreSettings
from keepstep_agent.core.stored.object_layout import PROBE_PREFIX
from keepstep_agent.ports import ObjectStore

S3_SERVERS = ["rclone_tls", "moto", "verifying"]
S3_SERVERS_AT_NIGHT = ["rclone", "seaweed", "ceph"]
PLAIN = "plain bodies on "
"""The reference for how bytes move, on the strictest server and over TLS."""
S3_KINDS_AT_NIGHT = [*S3_SERVERS_AT_NIGHT, f"{PLAIN}ceph", f"{PLAIN}rclone_tls"]
IN_MEMORY = {"memory": MemoryStore, "fake": FakeStore}
S3_KINDS = [*S3_SERVERS, *S3_KINDS_AT_NIGHT]
TELLS_MD5 = [*IN_MEMORY, *S3_KINDS]
REFUSES_IF_PRESENT = [*IN_MEMORY, "filesystem", "moto", "seaweed", "ceph"]
PART_BYTES = 5 * MIB


@pytest.fixture(params=[*IN_MEMORY, "filesystem", *S3_SERVERS, *nightly(*S3_KINDS_AT_NIGHT)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def store(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ObjectStore]:
    async with AsyncExitStack() as stack:
        store: ObjectStore
        if kind in IN_MEMORY:
            store = IN_MEMORY[kind]()
        else:
            if kind == "filesystem":
                settings = StoreSettings(destination=f"file://{tmp_path}/destination")
                store = await stack.enter_async_context(open_store(settings))
            else:
                settings = request.getfixturevalue(f"{kind.removeprefix(PLAIN)}_bucket").settings()
                way = PlainTransfer if kind.startswith(PLAIN) else DirectTransfer
                store = await open_s3_store(settings, RateLimiter(), way)
                stack.push_async_callback(store.close)
        await store.probe()
        yield store


async def keys(store: ObjectStore, prefix: str = "") -> list[str]:
    """Sorted: SeaweedFS lists by folder."""
    return sorted([info.key async for info in store.list(prefix)], key=str.encode)


async def folders(store: ObjectStore, prefix: str = "") -> list[str]:
    return sorted([folder async for folder in store.list_folders(prefix)], key=str.encode)


async def send_in_parts(store: ObjectStore, key: str, file: Path) -> None:
    upload = await store.create_upload(key)
    receipts = [
        await store.put_part(key, upload, number, region, checksum)
        for number, (region, checksum) in enumerate(parts_of(file, PART_BYTES), start=1)
    ]
    await store.complete_upload(key, upload, receipts)


async def fails(kind: ErrorKind, awaitable: object) -> StoreError:
    with pytest.raises(StoreError) as caught:
        await awaitable  # type: ignore[misc]
    assert caught.value.kind is kind, caught.value
    return caught.value


async def test_a_small_object_comes_back_as_it_was_put(store: ObjectStore) -> None:
    await store.put("a/b.json", b"hello")

    assert await store.get("a/b.json", limit_bytes=5) == b"hello"
    (listed,) = [one async for one in store.list("")]
    for info in (listed, await store.head("a/b.json")):
        assert (info.key, info.size_bytes, info.version) == ("a/b.json", 5, listed.version)


async def test_other_bytes_have_another_version(store: ObjectStore) -> None:
    await store.put("a", b"one")
    before = await store.head("a")
    await store.put("a", b"two")

    assert (await store.head("a")).version != before.version


async def test_an_empty_object_is_an_object(store: ObjectStore) -> None:
    await store.put("empty", b"")

    assert await store.get("empty", limit_bytes=10) == b""
    assert await keys(store) == ["empty"]


async def test_a_repeated_put_of_the_same_bytes_is_harmless(store: ObjectStore) -> None:
    await store.put("a", b"same")
    await store.put("a", b"same")

    assert await store.get("a", limit_bytes=10) == b"same"


async def test_an_object_larger_than_the_limit_is_not_read(store: ObjectStore) -> None:
    await store.put("a", b"123456")

    await fails(ErrorKind.REQUEST_REFUSED, store.get("a", limit_bytes=5))


async def test_a_key_that_does_not_exist_is_not_found(store: ObjectStore, tmp_path: Path) -> None:
    await store.put("a", b"")

    await fails(ErrorKind.NOT_FOUND, store.head("b/c"))
    await fails(ErrorKind.NOT_FOUND, store.get("b/c", limit_bytes=1))
    with (tmp_path / "into").open("wb") as file:
        await fails(
            ErrorKind.NOT_FOUND,
            store.get_into("b/c", offset_bytes=0, size_bytes=1, version="x", descriptor=file.fileno()),
        )


async def test_a_conditional_put_refuses_an_existing_key_where_the_probe_says_so(store: ObjectStore, kind: str) -> None:
    capabilities = await store.probe()
    if kind in REFUSES_IF_PRESENT:
        assert capabilities.conditional_put
    await store.put("a", b"1", if_absent=True)

    if capabilities.conditional_put:
        await fails(ErrorKind.ALREADY_EXISTS, store.put("a", b"2", if_absent=True))
        assert await store.get("a", limit_bytes=9) == b"1"
    else:
        await store.put("a", b"2", if_absent=True)
        assert await store.get("a", limit_bytes=9) == b"2"


async def test_a_probe_leaves_nothing_behind(store: ObjectStore) -> None:
    await store.probe()

    assert await keys(store, PROBE_PREFIX) == []
    assert [one async for one in store.list_uploads("")] == []


async def test_a_listing_is_by_prefix_and_names_each_key_once(store: ObjectStore) -> None:
    names = ["b/2", "b/10", "b-x", "a", "b/é", "b/c/d", "c/with space+plus%41&<x>"]
    for name in names:
        await store.put(name, b"x")

    assert await keys(store) == sorted(names, key=str.encode)
    assert await keys(store, "b/") == ["b/10", "b/2", "b/c/d", "b/é"]
    assert await keys(store, "b") == ["b-x", "b/10", "b/2", "b/c/d", "b/é"]
    assert await keys(store, "nothing/") == []


async def test_the_folders_of_a_level_are_those_that_hold_an_object(store: ObjectStore, kind: str) -> None:
    for name in ["a", "b/1", "b/2", "b-x", "b/c/d", "c/.keepstep/commits/1", "c/with space+plus%41&<x>/1", "é/é/1"]:
        await store.put(name, b"x")
    await store.put("gone/1", b"x")
    await store.delete("gone/1")

    # SeaweedFS lists an emptied folder for some seconds.
    left = {".keepstep/", "gone/"} if kind == "seaweed" else set()
    assert [one for one in await folders(store) if one not in left] == ["b/", "c/", "é/"]
    assert await folders(store, "b/") == ["b/c/"]
    assert await folders(store, "c/") == ["c/.keepstep/", "c/with space+plus%41&<x>/"]
    assert await folders(store, "b/c/") == await folders(store, "nothing/") == []


@pytest.mark.parametrize("kind", ["filesystem", *S3_SERVERS, *nightly(*S3_SERVERS_AT_NIGHT)])
async def test_a_destination_means_every_letter_of_it(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if kind == "filesystem":
        settings = StoreSettings(destination=f"file://{tmp_path}/destination")
    else:
        settings = request.getfixturevalue(f"{kind}_bucket").settings()
    names = ["exp#3/out", "exp#4/out", "exp?3/out", "exp%233/out", "exp"]
    for name in names:
        async with open_store(replace(settings, destination=f"{settings.destination}/{name}")) as store:
            await store.put("a", name.encode())

    async with open_store(settings) as store:
        assert await keys(store) == sorted(f"{name}/a" for name in names)
        assert [await store.get(f"{name}/a", limit_bytes=99) for name in names] == [name.encode() for name in names]


async def test_a_deleted_object_is_gone_and_deleting_it_again_is_fine(store: ObjectStore) -> None:
    await store.put("a/b", b"x")
    await store.put("a/c", b"x")

    await store.delete("a/b")
    await store.delete("a/b")

    assert await keys(store) == ["a/c"]


async def test_a_region_becomes_an_object(store: ObjectStore, tmp_path: Path) -> None:
    file = make_file(tmp_path / "file", 3 * MIB)
    region = region_of(file, MIB, 2 * MIB - 7)

    await store.put_data("x", region, region_checksum(region))

    assert await store.get("x", limit_bytes=2 * MIB) == file.read_bytes()[MIB : 3 * MIB - 7]


async def test_bytes_in_memory_become_an_object_and_again_the_same(store: ObjectStore) -> None:
    body = bytearray(random.Random(1).randbytes(3 * MIB + 7))

    for _ in range(2):
        await store.put_data("x", body, crc64nvme(body))

    assert await store.get("x", limit_bytes=4 * MIB) == body


@pytest.mark.parametrize("if_absent", [False, True])
async def test_a_large_object_is_put_and_read_without_being_in_memory_twice(
    store: ObjectStore, kind: str, if_absent: bool
) -> None:
    body = random.Random(1).randbytes(24 * MIB)
    tracemalloc.start()
    try:
        await store.put("x", body, if_absent=if_absent)
        _, put_bytes = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        found = await store.get("x", limit_bytes=len(body))
        _, got_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == body
    # The server of one is in this process, and the other bodies are the tests' own.
    if kind != "verifying" and not kind.startswith(PLAIN):
        assert put_bytes < 12 * MIB
        assert got_bytes < 36 * MIB


async def test_an_empty_region_becomes_an_empty_object(store: ObjectStore, tmp_path: Path) -> None:
    region = region_of(make_file(tmp_path / "file", 0))

    await store.put_data("x", region, region_checksum(region))

    assert (await store.head("x")).size_bytes == 0


async def test_parts_become_one_object(store: ObjectStore, tmp_path: Path) -> None:
    file = make_file(tmp_path / "file", 2 * PART_BYTES + 12345)

    await send_in_parts(store, "big", file)

    info = await store.head("big")
    assert info.size_bytes == file.stat().st_size
    target = tmp_path / "target"
    with target.open("wb") as into:
        checksum = 0
        for offset in (PART_BYTES, 0, 2 * PART_BYTES):
            size = min(PART_BYTES, info.size_bytes - offset)
            checksum = await store.get_into(
                "big", offset_bytes=offset, size_bytes=size, version=info.version, descriptor=into.fileno()
            )
    assert target.read_bytes() == file.read_bytes()
    assert checksum == crc64nvme(file.read_bytes()[2 * PART_BYTES :])
    assert [one async for one in store.list_uploads("")] == []


async def test_parts_may_come_in_any_order_and_again(store: ObjectStore, tmp_path: Path) -> None:
    file = make_file(tmp_path / "file", 2 * PART_BYTES + 1)
    parts = parts_of(file, PART_BYTES)
    upload = await store.create_upload("big")

    receipts = {number: await store.put_part("big", upload, number, *parts[number - 1]) for number in (3, 1, 2, 1)}
    await store.complete_upload("big", upload, [receipts[1], receipts[2], receipts[3]])

    assert await store.get("big", limit_bytes=3 * PART_BYTES) == file.read_bytes()


async def test_an_upload_and_its_parts_are_listed_until_it_ends(store: ObjectStore, tmp_path: Path, kind: str) -> None:
    file = make_file(tmp_path / "file", 2 * PART_BYTES)
    parts = parts_of(file, PART_BYTES)
    upload = await store.create_upload("runs/big")
    assert await store.list_parts("runs/big", upload) == []
    receipts = [await store.put_part("runs/big", upload, number, *parts[number - 1]) for number in (1, 2)]

    listed = await store.list_parts("runs/big", upload)

    assert [(part.number, part.size_bytes, part.receipt) for part in listed] == [
        (1, PART_BYTES, receipts[0]),
        (2, PART_BYTES, receipts[1]),
    ]
    assert [part.md5 for part in listed] == [region_md5(region) if kind in TELLS_MD5 else "" for region, _ in parts]
    (found,) = [one async for one in store.list_uploads("runs/")]
    assert (found.key, found.upload) == ("runs/big", upload)
    assert found.size_bytes in (None, 2 * PART_BYTES)
    assert [one async for one in store.list_uploads("other/")] == []
    assert await keys(store) == []
    await store.abort_upload("runs/big", upload)
    assert [one async for one in store.list_uploads("")] == []


async def test_an_aborted_upload_is_lost_and_aborting_it_again_is_fine(
    store: ObjectStore, tmp_path: Path, kind: str
) -> None:
    region = region_of(make_file(tmp_path / "file", 100))
    upload = await store.create_upload("big")
    receipt = await store.put_part("big", upload, 1, region, region_checksum(region))

    await store.abort_upload("big", upload)
    await store.abort_upload("big", upload)

    if kind != "moto":  # moto itself fails here, with 500
        await fails(ErrorKind.UPLOAD_LOST, store.put_part("big", upload, 2, region, region_checksum(region)))
    await fails(ErrorKind.UPLOAD_LOST, store.list_parts("big", upload))
    await fails(ErrorKind.UPLOAD_LOST, store.complete_upload("big", upload, [receipt]))
    await fails(ErrorKind.NOT_FOUND, store.head("big"))


async def test_an_upload_completed_twice_leaves_the_object_whole(store: ObjectStore, tmp_path: Path) -> None:
    region = region_of(make_file(tmp_path / "file", 1000))
    upload = await store.create_upload("big")
    receipt = await store.put_part("big", upload, 1, region, region_checksum(region))
    await store.complete_upload("big", upload, [receipt])

    kinds = []
    try:
        await store.complete_upload("big", upload, [receipt])
    except StoreError as error:
        kinds.append(error.kind)

    assert kinds in ([], [ErrorKind.UPLOAD_LOST])
    assert (await store.head("big")).size_bytes == 1000


async def test_a_file_that_is_not_what_the_checksum_covers_is_never_stored(store: ObjectStore, tmp_path: Path) -> None:
    region = region_of(make_file(tmp_path / "file", 2 * MIB))
    upload = await store.create_upload("big")

    for send in (
        store.put_data("small", region, region_checksum(region) ^ 1),
        store.put_part("big", upload, 1, region, region_checksum(region) ^ 1),
    ):
        with pytest.raises(VolumeError) as caught:
            await send
        assert caught.value.kind is ErrorKind.FILE_CHANGED

    assert await keys(store) == []
    assert await store.list_parts("big", upload) == []
    await store.abort_upload("big", upload)


async def test_a_file_that_is_gone_is_missing(store: ObjectStore, tmp_path: Path) -> None:
    region = region_of(make_file(tmp_path / "file", 10))
    (tmp_path / "file").unlink()

    with pytest.raises(VolumeError) as caught:
        await store.put_data("x", region, 0)
    assert caught.value.kind is ErrorKind.FILE_MISSING


async def test_a_range_beyond_the_object_or_of_another_object_is_corrupt(store: ObjectStore, tmp_path: Path) -> None:
    await store.put("a", b"0123456789")
    version = (await store.head("a")).version
    with (tmp_path / "into").open("wb") as into:
        for offset, size, expected in ((5, 6, version), (20, 1, version), (0, 10, "0" * 32)):
            await fails(
                ErrorKind.CHECKPOINT_CORRUPT,
                store.get_into("a", offset_bytes=offset, size_bytes=size, version=expected, descriptor=into.fileno()),
            )


async def test_a_full_local_disk_is_named_as_such(store: ObjectStore) -> None:
    await store.put("a", b"0123456789")
    version = (await store.head("a")).version
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(VolumeError) as caught:
            await store.get_into("a", offset_bytes=0, size_bytes=10, version=version, descriptor=full)
    finally:
        os.close(full)
    assert caught.value.kind is ErrorKind.DISK_FULL


async def test_a_small_file_is_told_by_its_md5_where_parts_are(store: ObjectStore, tmp_path: Path, kind: str) -> None:
    region = region_of(make_file(tmp_path / "file", MIB))
    await store.put_data("x", region, region_checksum(region))

    assert (await store.head("x")).md5 == (region_md5(region) if kind in TELLS_MD5 else "")


async def test_rules_are_said_or_there_are_none_or_the_store_does_not_tell(store: ObjectStore, kind: str) -> None:
    for ask in (store.aborts_uploads, store.keeps_old_versions):
        answer: object = None
        with suppress(StoreError):
            answer = await ask()
        # Only a bucket has rules, and a new one has none.
        assert answer is None or (answer is False and kind in S3_KINDS)


async def test_closing_twice_is_fine(store: ObjectStore) -> None:
    await store.close()
    await store.close()
