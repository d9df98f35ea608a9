"""Answers without end: listings that always have more, bodies and headers that come a byte at a time, and too much."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.servers.scripted import Asked, ScriptedServer, response
from tests.servers.tls import Certificate

from keepstep_agent.adapters.checksum import crc64nvme
from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.adapters.s3 import listings
from keepstep_agent.adapters.transfer.stall_timeout import LEAST_BYTES_PER_SECOND
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.settings.values import MIB, StoreSettings
from keepstep_agent.ports import ObjectStore

PATIENCE_SECONDS = 3.0
"""Most of it to connect: on a busy machine a TLS handshake takes a second."""
DRIP_SECONDS = 0.05
WHEN = "2026-01-01T00:00:00.000Z"

Answer = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]
Operation = Callable[[ObjectStore, Path], Awaitable[object]]


async def _list(store: ObjectStore, _: Path) -> object:
    return [one async for one in store.list("")]


async def _list_folders(store: ObjectStore, _: Path) -> object:
    return [one async for one in store.list_folders("")]


async def _list_uploads(store: ObjectStore, _: Path) -> object:
    return [one async for one in store.list_uploads("")]


async def _get_into(store: ObjectStore, folder: Path) -> object:
    with (folder / "into").open("wb") as file:
        return await store.get_into("a", offset_bytes=0, size_bytes=MIB, version="e", descriptor=file.fileno())


LISTS: dict[str, Operation] = {
    "list": _list,
    "list-folders": _list_folders,
    "list-uploads": _list_uploads,
    "list-parts": lambda store, _: store.list_parts("a", "upload"),
}
READS: dict[str, Operation] = {
    **LISTS,
    "head": lambda store, _: store.head("a"),
    "get": lambda store, _: store.get("a", limit_bytes=16 * MIB),
    "get-into": _get_into,
}


@asynccontextmanager
async def asked(
    answer: Answer,
    certificate: Certificate | None = None,
    *,
    patience_seconds: float = HANG_SECONDS,
    to_connect: float = 0.5,
) -> AsyncIterator[tuple[ObjectStore, ScriptedServer]]:
    async with ScriptedServer(answer, certificate=certificate) as server:
        settings = StoreSettings(
            destination="s3://bucket/run",
            endpoint_url=server.url,
            ca_bundle=str(certificate.certificate) if certificate else "",
            connect_timeout_seconds=patience_seconds * to_connect,
            read_timeout_seconds=patience_seconds * (1 - to_connect),
        )
        async with open_store(settings) as store:
            yield store, server


def a_page(number: int, following: int, entries: int = 1) -> bytes:
    """What serves as a page of any listing. There is always more."""
    keys = [f"run/{number:09}-{entry:04}" for entry in range(entries)]
    contents = "".join(
        f"<Contents><Key>{key}</Key><Size>1</Size><LastModified>{WHEN}</LastModified></Contents>"
        f"<Upload><Key>{key}</Key><UploadId>u</UploadId><Initiated>{WHEN}</Initiated></Upload>"
        f"<Part><PartNumber>{entry + 1}</PartNumber><Size>1</Size><ETag>e</ETag></Part>"
        for entry, key in enumerate(keys)
    )
    return (
        f"<Listing><IsTruncated>true</IsTruncated>{contents}"
        f"<NextContinuationToken>{following}</NextContinuationToken><NextKeyMarker>{following}</NextKeyMarker>"
        f"<NextUploadIdMarker>u</NextUploadIdMarker><NextPartNumberMarker>{following}</NextPartNumberMarker></Listing>"
    ).encode()


def pages(following: Callable[[int], int], entries: int = 1) -> Answer:
    numbers = itertools.count(1)

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        number = next(numbers)
        writer.write(response(200, a_page(number, following(number), entries)))

    return answer


@pytest.mark.parametrize("operation", LISTS)
@pytest.mark.parametrize("circle", [1, 2, 5])
async def test_a_listing_that_goes_round_in_a_circle_is_a_failure(
    operation: str, circle: int, s3_environment: None, tmp_path: Path
) -> None:
    async with asked(pages(lambda number: number % circle + 1)) as (store, server), asyncio.timeout(HANG_SECONDS):
        with pytest.raises(StoreError, match="no new place to continue") as caught:
            await LISTS[operation](store, tmp_path)
        assert len(server.asked) == circle + 1
    assert caught.value.kind is ErrorKind.STORE_FAILED


@pytest.mark.parametrize("operation", LISTS)
async def test_a_listing_ends_at_as_many_entries_as_no_run_has(
    operation: str, s3_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listings, "MOST_ENTRIES", 2_500)
    async with asked(pages(lambda number: number, 1000)) as (store, server), asyncio.timeout(HANG_SECONDS):
        with pytest.raises(StoreError, match="more than 2500 entries") as caught:
            await LISTS[operation](store, tmp_path)
        assert len(server.asked) == 3
    assert caught.value.kind is ErrorKind.REQUEST_REFUSED
    assert "prefix" in caught.value.hint


@pytest.mark.parametrize("operation", LISTS)
async def test_a_listing_of_empty_pages_ends(
    operation: str, s3_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listings, "MOST_SECONDS", 0.1)
    async with asked(pages(lambda number: number, 0)) as (store, _), asyncio.timeout(HANG_SECONDS):
        with pytest.raises(StoreError, match="takes longer") as caught:
            await LISTS[operation](store, tmp_path)
    assert caught.value.kind is ErrorKind.REQUEST_REFUSED


HEAD = b"HTTP/1.1 200 OK\r\nETag: e\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n"


async def drip(writer: asyncio.StreamWriter, piece: bytes) -> None:
    while True:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(DRIP_SECONDS)


async def dripping_body(asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + f"Content-Length: {MIB}\r\n\r\n".encode())
    await drip(writer, b"x")


async def dripping_chunks(asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    await drip(writer, b"1\r\n \r\n")


async def dripping_headers(asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD)
    await drip(writer, b"x")


async def dripping_interim_answers(asked: Asked, writer: asyncio.StreamWriter) -> None:
    await drip(writer, b"HTTP/1.1 102 Processing\r\n\r\n")


async def dripping_error(asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(f"HTTP/1.1 500 No\r\nContent-Length: {MIB}\r\n\r\n".encode())
    await drip(writer, b"x")


DRIPS: list[tuple[Answer, list[str]]] = [
    (dripping_body, ["list", "list-uploads", "list-parts", "get", "get-into"]),
    (dripping_chunks, ["list", "list-uploads", "list-parts"]),
    (dripping_headers, ["list", "head", "get-into"]),
    (dripping_interim_answers, ["list", "head", "get-into"]),
    (dripping_error, ["list", "get", "get-into"]),
]


@pytest.mark.parametrize(
    ("answer", "operation", "secure"),
    [
        pytest.param(answer, operation, secure, id=f"{answer.__name__}-{operation}-{'tls' if secure else 'http'}")
        for answer, operations in DRIPS
        for operation in operations
        for secure in ([False, True] if answer is dripping_body else [False])
    ],
)
async def test_what_comes_a_byte_at_a_time_is_given_up(
    answer: Answer, operation: str, secure: bool, certificate: Certificate, s3_environment: None, tmp_path: Path
) -> None:
    async with (
        asked(answer, certificate if secure else None, patience_seconds=PATIENCE_SECONDS, to_connect=0.8) as (store, _),
        asyncio.timeout(HANG_SECONDS),
    ):
        with pytest.raises(StoreError) as caught:
            await READS[operation](store, tmp_path)
    assert caught.value.kind is ErrorKind.TIMED_OUT


@pytest.mark.parametrize("operation", ["get", "get-into"])
async def test_a_body_on_a_slow_line_arrives_whole(operation: str, s3_environment: None, tmp_path: Path) -> None:
    """For longer than the store may be silent, in small pieces; a machine that is busy catches up."""
    body = bytes(range(256)) * (MIB // 256)
    patience_seconds, takes_seconds = 6.0, 10.0
    assert len(body) / takes_seconds > 100 * LEAST_BYTES_PER_SECOND

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode())
        sent, began_at = 0, time.monotonic()
        while sent < len(body):
            due = min(len(body), int((time.monotonic() - began_at) / takes_seconds * len(body)) + 1)
            writer.write(body[sent:due])
            await writer.drain()
            sent = due
            await asyncio.sleep(DRIP_SECONDS)

    slow = asked(answer, patience_seconds=patience_seconds, to_connect=0.25)
    async with slow as (store, _), asyncio.timeout(HANG_SECONDS):
        found = await READS[operation](store, tmp_path)
    assert found == (body if operation == "get" else crc64nvme(body))


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("operation", LISTS)
async def test_an_answer_of_any_length_takes_little_memory(
    operation: str, status: int, s3_environment: None, tmp_path: Path
) -> None:
    sent = 0

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(f"HTTP/1.1 {status} Scripted\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        piece = b"<a>" + bytes(65533)
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"10000\r\n" + piece + b"\r\n")
                await writer.drain()
                sent += len(piece)

    async with asked(answer) as (store, _), asyncio.timeout(HANG_SECONDS):
        with pytest.raises(StoreError) as caught:
            await LISTS[operation](store, tmp_path)
    assert caught.value.kind is ErrorKind.STORE_FAILED
    assert "more than" in str(caught.value)
    assert sent < 32 * MIB


STRANGE_PAGES = {
    "another-prefix": "<Contents><Key>other</Key><Size>1</Size><LastModified>{when}</LastModified></Contents>",
    "no-key": "<Contents><Size>1</Size><LastModified>{when}</LastModified></Contents>",
    "no-size": "<Contents><Key>run/a</Key><LastModified>{when}</LastModified></Contents>",
    "size-of-words": "<Contents><Key>run/a</Key><Size>much</Size><LastModified>{when}</LastModified></Contents>",
    "no-date": "<Contents><Key>run/a</Key><Size>1</Size></Contents>",
    "date-of-words": "<Contents><Key>run/a</Key><Size>1</Size><LastModified>then</LastModified></Contents>",
    "date-inf": "<Contents><Key>run/a</Key><Size>1</Size><LastModified>inf</LastModified></Contents>",
    "date-1e999": "<Contents><Key>run/a</Key><Size>1</Size><LastModified>1e999</LastModified></Contents>",
    "date-1e18": "<Contents><Key>run/a</Key><Size>1</Size><LastModified>1e18</LastModified></Contents>",
    "size-of-4300-digits": f"<Contents><Key>run/a</Key><Size>{'9' * 5000}</Size></Contents>",
    "deep": "<a>" * 100_000 + "</a>" * 100_000,
    "half": "<Contents>",
    "no-end": "",
}


@pytest.mark.parametrize("page", STRANGE_PAGES)
async def test_a_listing_that_is_none_is_an_unusable_answer(page: str, s3_environment: None, tmp_path: Path) -> None:
    truncated = "" if page in ("no-end", "deep") else "<IsTruncated>false</IsTruncated>"
    body = f"<ListBucketResult>{truncated}{STRANGE_PAGES[page].format(when=WHEN)}</ListBucketResult>".encode()

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(response(200, body))

    async with asked(answer) as (store, _), asyncio.timeout(HANG_SECONDS):
        with pytest.raises(StoreError) as caught:
            await _list(store, tmp_path)
    assert caught.value.kind is ErrorKind.STORE_FAILED


@pytest.mark.parametrize(
    "page",
    [
        pytest.param("", id="no-end"),
        pytest.param("<IsTruncated>false</IsTruncated><CommonPrefixes></CommonPrefixes>", id="no-name"),
        pytest.param(
            "<IsTruncated>false</IsTruncated><CommonPrefixes><Prefix>elsewhere/a/</Prefix></CommonPrefixes>",
            id="elsewhere",
        ),
    ],
)
async def test_a_listing_of_folders_that_is_none_is_an_unusable_answer(
    page: str, s3_environment: None, tmp_path: Path
) -> None:
    body = f"<ListBucketResult>{page}</ListBucketResult>".encode()

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(response(200, body))

    async with asked(answer) as (store, _), asyncio.timeout(HANG_SECONDS):
        with pytest.raises(StoreError) as caught:
            await _list_folders(store, tmp_path)
    assert caught.value.kind is ErrorKind.STORE_FAILED
