"""What is particular to a directory as the destination."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.regions import make_file, region_of

from keepstep_agent.adapters.checksum import region_checksum
from keepstep_agent.adapters.file_store.directory import ObjectDirectory
from keepstep_agent.adapters.file_store.store import FilesystemStore, parse_directory
from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.adapters.rate_limit import RateLimiter
from keepstep_agent.core.errors import ErrorKind, KeepstepError, StoreError
from keepstep_agent.core.settings.values import MIB, StoreSettings
from keepstep_agent.ports import ObjectStore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "destination"


@pytest.fixture
async def store(root: Path) -> AsyncIterator[ObjectStore]:
    async with open_store(StoreSettings(destination=f"file://{root}")) as store:
        await store.probe()
        yield store


async def fails(kind: ErrorKind, awaitable: object) -> None:
    with pytest.raises(StoreError) as caught:
        await awaitable  # type: ignore[misc]
    assert caught.value.kind is kind, caught.value


def files_below(root: Path) -> list[str]:
    return [path.name for path in root.rglob("*") if path.is_file()]


async def until_empty(root: Path) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        while files_below(root):  # noqa: ASYNC110 - threads change it
            await asyncio.sleep(0.01)


def sizes_of(root: Path, name: str) -> set[int]:
    return {path.stat().st_size for path in root.glob(name)}


@pytest.mark.parametrize(
    "key",
    ["../x", "a/../../x", "/etc/passwd", "a//b", "", "./a", "a/.", "a\0b", ".keepstep/uploads", ".keepstep/uploads/x"],
)
async def test_no_key_leads_out_of_the_root_or_among_the_uploads(store: ObjectStore, root: Path, key: str) -> None:
    await fails(ErrorKind.REQUEST_REFUSED, store.put(key, b"x"))
    await fails(ErrorKind.REQUEST_REFUSED, store.create_upload(key))
    await fails(ErrorKind.REQUEST_REFUSED, store.get(key, limit_bytes=1))
    assert sorted(path.name for path in root.parent.iterdir()) == ["destination"]


async def test_a_symbolic_link_does_not_lead_out_of_the_root(store: ObjectStore, root: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (root / "link").symlink_to(tmp_path / "outside")

    await fails(ErrorKind.REQUEST_REFUSED, store.put("link/x", b"x"))


async def test_only_objects_are_files_of_the_destination(store: ObjectStore, root: Path, tmp_path: Path) -> None:
    region = region_of(make_file(tmp_path / "file", 100))
    upload = await store.create_upload("run/big")
    await store.put_part("run/big", upload, 1, region, region_checksum(region))
    await store.put("run/small", b"x")

    assert [info.key async for info in store.list("")] == ["run/small"]
    await store.abort_upload("run/big", upload)
    assert files_below(root) == ["small"]


async def test_deleting_the_last_object_removes_the_folders_it_leaves_empty(store: ObjectStore, root: Path) -> None:
    await store.put("a/b/c/d", b"x")
    await store.put("a/e", b"x")

    await store.delete("a/b/c/d")

    assert [path.name for path in (root / "a").iterdir()] == ["e"]


def test_writers_and_removers_of_one_folder_do_not_break_each_other(root: Path) -> None:
    objects = ObjectDirectory(root)

    def write_and_remove(number: int) -> None:
        for _ in range(500):
            objects.write(f"a/b/{number}", b"x", if_absent=bool(number % 2))
            objects.delete(f"a/b/{number}")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads take turns between any two system calls, as on a busy machine
    try:
        with ThreadPoolExecutor(4) as threads:
            for _ in threads.map(write_and_remove, range(4)):
                pass
    finally:
        sys.setswitchinterval(interval)

    assert list(objects.listing("")) == []


async def test_no_reader_ever_sees_half_an_object(store: ObjectStore, root: Path, tmp_path: Path) -> None:
    region = region_of(make_file(tmp_path / "file", 16 * MIB))
    writing = asyncio.create_task(store.put_data("a", region, region_checksum(region)))
    sizes = set()
    while not writing.done():
        sizes.update(sizes_of(root, "a"))
        await asyncio.sleep(0)
    await writing

    assert sizes <= {16 * MIB}


async def test_one_of_many_conditional_writers_wins(store: ObjectStore) -> None:
    results = await asyncio.gather(
        *(store.put("a", str(number).encode(), if_absent=True) for number in range(8)), return_exceptions=True
    )

    winners = [number for number, result in enumerate(results) if result is None]
    assert len(winners) == 1
    assert await store.get("a", limit_bytes=1) == str(winners[0]).encode()


async def test_a_file_in_the_way_of_a_folder_is_refused(store: ObjectStore) -> None:
    await store.put("a", b"x")

    await fails(ErrorKind.REQUEST_REFUSED, store.put("a/b", b"x"))
    # A listing that called it empty would hide what belongs there.
    await fails(ErrorKind.REQUEST_REFUSED, anext(aiter(store.list("a/"))))


async def test_nothing_is_missing_at_a_destination_that_is_away_but_the_destination(
    store: ObjectStore, root: Path, tmp_path: Path
) -> None:
    await store.put("a", b"x")
    version = (await store.head("a")).version
    os.rename(root, tmp_path / "away")  # noqa: PTH104

    with (tmp_path / "into").open("wb") as into:
        for read in (
            store.head("a"),
            store.get("a", limit_bytes=1),
            store.get_into("a", offset_bytes=0, size_bytes=1, version=version, descriptor=into.fileno()),
            anext(aiter(store.list(""))),
        ):
            await fails(ErrorKind.BUCKET_MISSING, read)


async def test_a_name_that_is_too_long_is_refused(store: ObjectStore) -> None:
    await fails(ErrorKind.REQUEST_REFUSED, store.put("x" * 300, b"x"))


async def test_an_object_that_was_replaced_is_not_taken_for_the_old_one(store: ObjectStore, tmp_path: Path) -> None:
    await store.put("a", b"old")
    version = (await store.head("a")).version
    await store.put("a", b"new")

    with (tmp_path / "into").open("wb") as into:
        await fails(
            ErrorKind.CHECKPOINT_CORRUPT,
            store.get_into("a", offset_bytes=0, size_bytes=3, version=version, descriptor=into.fileno()),
        )


def leave_over(root: Path, *, age_seconds: float) -> list[Path]:
    """What agents that were killed have left: an object half-written, and uploads half-made and half-forgotten."""
    uploads = root / ".keepstep" / "uploads"
    half_written, half_made, half_forgotten = (uploads / f"{name}-{age_seconds:.0f}" for name in ("put", "a", "b"))
    half_made.mkdir(parents=True)
    half_forgotten.mkdir()
    half_written.write_bytes(b"x")
    (half_forgotten / "data").write_bytes(b"x")
    (half_forgotten / "part-00001").write_bytes(b"{}")
    left = [half_made, half_forgotten, half_written]
    for path in left:
        os.utime(path, (time.time() - age_seconds,) * 2)
    return left


async def test_leftovers_are_told_as_uploads_that_may_be_aborted(store: ObjectStore, root: Path) -> None:
    alive = await store.create_upload("a")
    left = leave_over(root, age_seconds=3600)
    listed = [one async for one in store.list_uploads("")]
    assert sorted(one.size_bytes or 0 for one in listed) == [0, 0, 1, 3]
    for found in listed:
        if found.upload == alive:
            assert found.key == "a"
            continue
        assert found.started_at < time.time() - 3000
        await store.abort_upload(found.key, found.upload)
    assert not any(path.exists() for path in left)
    assert [one.upload async for one in store.list_uploads("")] == [alive]


async def test_a_cancelled_upload_ends_although_all_threads_hang_in_a_dead_mount(root: Path, tmp_path: Path) -> None:
    region = region_of(make_file(tmp_path / "file", 4 * MIB))
    # After its time-out, whoever waits for a hung thread would go on, too.
    settings = StoreSettings(destination=f"file://{root}", read_timeout_seconds=10 * HANG_SECONDS)
    async with open_store(settings, limiter=RateLimiter(1000)) as store:
        uploading = asyncio.create_task(store.put_data("a", region, region_checksum(region)))
        async with asyncio.timeout(HANG_SECONDS):
            while sizes_of(root, ".keepstep/uploads/put-*") in (set(), {0}):  # noqa: ASYNC110 - threads change it
                await asyncio.sleep(0.01)
        # As system calls on a dead mount: they end when it is back.
        assert isinstance(store, FilesystemStore)
        is_back = threading.Event()
        try:
            for _ in range(8):
                store._executor.submit(is_back.wait)
            uploading.cancel()
            await asyncio.wait({uploading}, timeout=HANG_SECONDS)
            ended = uploading.done()
        finally:
            is_back.set()
        # It tidies up all the same.
        await until_empty(root)
    assert ended


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small filesystem")
@pytest.mark.root
async def test_a_full_destination_is_named_as_such_and_keeps_nothing_half(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(mount)], check=False)  # noqa: ASYNC221
    if mounted.returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    try:
        region = region_of(make_file(tmp_path / "file", 4 * MIB))
        async with open_store(StoreSettings(destination=f"file://{mount}")) as store:
            await fails(ErrorKind.STORE_FULL, store.put_data("a", region, region_checksum(region)))
            assert [info async for info in store.list("")] == []
            await until_empty(mount)  # a thread that still writes there makes the mount busy
            subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)  # noqa: ASYNC221
            await fails(ErrorKind.ACCESS_DENIED, store.put("b", b"x"))
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)  # noqa: ASYNC221


async def test_a_destination_that_went_away_fails_writes_until_it_is_back(tmp_path: Path) -> None:
    region = region_of(make_file(tmp_path / "file", 10))
    (tmp_path / "mount").mkdir()
    descriptor = os.open(tmp_path / "mount", os.O_RDONLY)
    (tmp_path / "mount").rmdir()  # nothing can be made in it any more: ENOENT, as below a mount that went away
    try:
        async with open_store(StoreSettings(destination=f"file:///proc/self/fd/{descriptor}/run")) as store:
            for write in (
                store.probe(),
                store.put("a", b"x"),
                store.put_data("a", region, region_checksum(region)),
                store.create_upload("a"),
            ):
                await fails(ErrorKind.STORE_FAILED, write)
    finally:
        os.close(descriptor)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_destination_that_may_not_be_written_is_denied(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o500)  # noqa: PTH101
    async with open_store(StoreSettings(destination=f"file://{tmp_path}/x")) as store:
        await fails(ErrorKind.ACCESS_DENIED, store.put("a", b"x"))


@pytest.mark.parametrize("path", ["/h/exp#3/out", "/h/exp?3/out", "/h/100%/out", "/h/exp%233/out", "/h/a b;c"])
def test_a_path_is_taken_as_it_is_written(path: str) -> None:
    assert parse_directory(f"file://{path}") == Path(path)


@pytest.mark.parametrize(
    "destination",
    [
        "file://relative/path",
        "file://localhost/a",
        "file:///a\0b",
        "file:",
        "s3://",
        "s3:///prefix",
        "s3://b/c//d",
        "gs://b/c",
        "/plain",
        "",
    ],
)
async def test_a_destination_that_is_none_is_refused_with_a_way_out(destination: str) -> None:
    with pytest.raises(KeepstepError) as caught:
        await open_store(StoreSettings(destination=destination)).__aenter__()

    assert caught.value.kind is ErrorKind.BAD_CONFIGURATION
    assert "://" in caught.value.hint


def _put_what_is_no_object(root: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    os.mkfifo(root / "run" / "pipe")
    (root / "run" / "link").symlink_to(tmp_path / "secret")
    (root / "run" / "loop").symlink_to(root / "run" / "loop")
    (root / "run" / "folder").mkdir()
    folder = os.open(root / "run", os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{folder}/socket")
    os.close(folder)
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere" / "deep" / "file").write_bytes(b"x")
    (root / "elsewhere").symlink_to(tmp_path / "elsewhere")


async def test_only_a_regular_file_is_an_object_and_nothing_else_is_waited_for(
    store: ObjectStore, root: Path, tmp_path: Path
) -> None:
    await store.put("run/object", b"x")
    _put_what_is_no_object(root, tmp_path)
    assert [info.key async for info in store.list("")] == ["run/object"]
    assert [info.key async for info in store.list("elsewhere/deep/")] == []
    with (tmp_path / "into").open("wb") as into:
        names = ("run/pipe", "run/link", "run/loop", "run/folder", "run/socket", "elsewhere/deep/file")
        async with asyncio.timeout(HANG_SECONDS):
            for key in names:
                await fails(ErrorKind.NOT_FOUND, store.head(key))
                await fails(ErrorKind.NOT_FOUND, store.get(key, limit_bytes=100))
                reading = store.get_into(key, offset_bytes=0, size_bytes=1, version="", descriptor=into.fileno())
                await fails(ErrorKind.NOT_FOUND, reading)


async def test_what_no_key_can_name_is_left_out_of_a_listing(store: ObjectStore, root: Path) -> None:
    await store.put("run/object", b"x")
    os.close(os.open(os.fsencode(root / "run") + b"/caf\xe9", os.O_CREAT | os.O_WRONLY))
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(1500):  # deeper than a path may be, and than a function may call itself
        os.mkdir("d", dir_fd=folder)
        below = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(folder)
    try:
        assert [info.key async for info in store.list("")] == ["run/object"]
    finally:
        # pytest would not come to its end.
        subprocess.run(["rm", "-r", root / "d"], check=True)  # noqa: ASYNC221


async def test_what_others_put_among_the_uploads_is_no_upload(store: ObjectStore, root: Path) -> None:
    upload = await store.create_upload("run/big")
    uploads = root / ".keepstep" / "uploads"
    for number, body in enumerate([b"", b"{", b'{"key":1}', b"[" * 100_000, b'{"key":"x"}', b"\xff" * 2**20]):
        (uploads / f"forged-{number}").mkdir()
        (uploads / f"forged-{number}" / "upload.json").write_bytes(body)
    (uploads / "pipe").mkdir()
    os.mkfifo(uploads / "pipe" / "upload.json")
    os.mkfifo(uploads / upload / "part-00001")
    async with asyncio.timeout(HANG_SECONDS):
        assert [upload.key async for upload in store.list_uploads("")] == ["run/big"]
        assert await store.list_parts("run/big", upload) == []
        await fails(ErrorKind.UPLOAD_LOST, store.list_parts("x", "forged-4"))
        await fails(ErrorKind.UPLOAD_LOST, store.list_parts("x", "pipe"))
