"""Calls to a store, the errors that they must end in, and the patience with them."""

import tempfile
from collections.abc import Awaitable, Callable

import pytest

from keepstep_agent.adapters.checksum import crc64nvme, region_checksum
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.model import Region
from keepstep_agent.ports import ObjectStore


async def fails(kind: ErrorKind, awaitable: Awaitable[object]) -> StoreError:
    with pytest.raises(StoreError) as caught:
        await awaitable
    assert caught.value.kind is kind, caught.value
    return caught.value


OPERATIONS: dict[str, Callable[[ObjectStore, Region, str, str], Awaitable[object]]] = {
    "put": lambda store, region, upload, version: store.put("b", b"x"),
    "put a region": lambda store, region, upload, version: store.put_data("b", region, region_checksum(region)),
    "put bytes": lambda store, region, upload, version: store.put_data("b", bytearray(b"x"), crc64nvme(b"x")),
    "create an upload": lambda store, region, upload, version: store.create_upload("b"),
    "put a part": lambda store, region, upload, version: store.put_part(
        "up", upload, 2, region, region_checksum(region)
    ),
    "list parts": lambda store, region, upload, version: store.list_parts("up", upload),
    "abort": lambda store, region, upload, version: store.abort_upload("up", upload),
    "list uploads": lambda store, region, upload, version: first_upload(store),
    "get": lambda store, region, upload, version: store.get("a", limit_bytes=9),
    "get into": lambda store, region, upload, version: get_into(store, "a", 1, version),
    "list": lambda store, region, upload, version: first_of_list(store),
    "delete": lambda store, region, upload, version: store.delete("a"),
    "probe": lambda store, region, upload, version: store.probe(),
}
"""How to call each operation with an object `a` of one byte with that ETag, and an upload of `up` in progress."""


async def get_into(store: ObjectStore, key: str, size_bytes: int, version: str) -> None:
    with tempfile.TemporaryFile() as into:
        await store.get_into(key, offset_bytes=0, size_bytes=size_bytes, version=version, descriptor=into.fileno())


async def first_of_list(store: ObjectStore) -> None:
    async for _ in store.list(""):
        return


async def first_upload(store: ObjectStore) -> None:
    async for _ in store.list_uploads(""):
        return
