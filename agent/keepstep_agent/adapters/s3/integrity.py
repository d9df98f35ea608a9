"""Payload checks by the store: which ones a store enforces, and the headers that ask for them.

The probe tests what a store really enforces instead of trusting its name.
"""

import base64
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any, Final

from keepstep_agent.adapters.checksum import crc32c, crc64nvme, region_crc32c, region_md5, region_sha256
from keepstep_agent.adapters.s3.errors import ignored
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.model import Region
from keepstep_agent.core.stored.object_layout import PROBE_PREFIX
from keepstep_agent.ports import StoreCapabilities

CHECKSUM_REFUSALS: Final = frozenset({ErrorKind.CORRUPTED_IN_TRANSIT, ErrorKind.REQUEST_REFUSED})
"""How stores refuse a body that does not match its announced checksum."""
UNSIGNED_PAYLOAD: Final = "UNSIGNED-PAYLOAD"
CHECKSUM_ALGORITHMS: Final = {"crc64nvme": "CRC64NVME", "crc32c": "CRC32C"}
"""Our names, mapped to S3's; the cheapest first."""


def declare(integrity: str, content: Region | bytearray, checksum: int) -> tuple[str, dict[str, str]]:
    """Return (x-amz-content-sha256, request arguments) for content whose CRC64NVME is `checksum`."""
    match integrity:
        case "crc64nvme":
            return UNSIGNED_PAYLOAD, {"ChecksumCRC64NVME": _encode(checksum, 8)}
        case "crc32c":
            value = crc32c(content) if isinstance(content, bytearray) else region_crc32c(content, checksum)
            return UNSIGNED_PAYLOAD, {"ChecksumCRC32C": _encode(value, 4)}
        case "md5":
            digest = _md5(content) if isinstance(content, bytearray) else bytes.fromhex(region_md5(content))
            return UNSIGNED_PAYLOAD, {"ContentMD5": base64.b64encode(digest).decode()}
        case "none":
            return UNSIGNED_PAYLOAD, {}
        case _:
            assert integrity == "sha256", integrity
            return hashlib.sha256(content).hexdigest() if isinstance(content, bytearray) else region_sha256(content), {}


def declare_upload(integrity: str) -> dict[str, str]:
    """Return the arguments of CreateMultipartUpload.

    A full-object checksum is combined from those of the parts, so CompleteMultipartUpload need not repeat them.
    """
    if integrity not in CHECKSUM_ALGORITHMS:
        return {}
    return {"ChecksumAlgorithm": CHECKSUM_ALGORITHMS[integrity], "ChecksumType": "FULL_OBJECT"}


def declare_bytes(integrity: str, body: bytes, *, flip: int = 0) -> dict[str, str]:
    """Return the request arguments for a small body. `flip` makes the checksum wrong in those bits.

    It always has a checksum, because a bucket with Object Lock refuses a write without one, before the probe too. Every
    store knows Content-MD5, so that is the one where no better is known.
    """
    match integrity:
        case "crc64nvme":
            return {"ChecksumCRC64NVME": _encode(crc64nvme(body) ^ flip, 8)}
        case "crc32c":
            return {"ChecksumCRC32C": _encode(crc32c(body) ^ flip, 4)}
        case _:
            assert not flip, "no probe needs a wrong MD5"
            return {"ContentMD5": base64.b64encode(_md5(body)).decode()}


def _md5(body: bytes | bytearray) -> bytes:
    return hashlib.md5(body, usedforsecurity=False).digest()


def _encode(checksum: int, size_bytes: int) -> str:
    return base64.b64encode(checksum.to_bytes(size_bytes, "big")).decode()


_BODY: Final = b"Keepstep probes what this store enforces."
_TRIES: Final = 5
_Request = Callable[[str, str], AbstractAsyncContextManager[object]]


async def probe(
    client: Any,
    bucket: str,
    prefix: str,
    *,
    write_arguments: Mapping[str, str],
    fallback: str,
    request: _Request,
) -> StoreCapabilities:
    """Find out what the store enforces. `fallback` is the integrity if it checks no checksum.

    Raises StoreError if the store cannot be written at all.
    """
    experiment = _Experiment(client, bucket, prefix, write_arguments, request)
    integrity = fallback
    try:
        conditional_put = await experiment.condition_holds()
        for candidate in CHECKSUM_ALGORITHMS:
            if await experiment.object_is_checked(candidate) and await experiment.part_is_checked(candidate):
                integrity = candidate
                break
        else:
            if await experiment.wants_checksum():
                integrity = "md5"
    except StoreError:
        # It says more than what may become of the removal.
        with suppress(StoreError):
            await experiment.clean_up()
        raise
    await experiment.clean_up()
    return StoreCapabilities(conditional_put=conditional_put, integrity=integrity)


class _Experiment:
    """Tests one store with one object. Its key is unique: many agents may probe at the same time."""

    def __init__(
        self, client: Any, bucket: str, prefix: str, write_arguments: Mapping[str, str], request: _Request
    ) -> None:
        self._client = client
        self._request = request
        self._key = f"{PROBE_PREFIX}{secrets.token_hex(8)}"
        self._target = {"Bucket": bucket, "Key": prefix + self._key}
        self._write_arguments = write_arguments

    async def condition_holds(self) -> bool:
        """Return whether the first conditional put passes and the second does not.

        A store without conditional puts may refuse the first one. If it then refuses one without a condition too, it
        cannot be written, and its error is raised.
        """
        try:
            await self._put(IfNoneMatch="*")
        except StoreError as error:
            if error.kind not in CHECKSUM_REFUSALS:
                raise
            await self._put()
            return False
        try:
            await self._put(IfNoneMatch="*")
        except StoreError as error:
            if error.kind is ErrorKind.ALREADY_EXISTS or error.kind in CHECKSUM_REFUSALS:
                return True
            raise
        return False

    async def _put(self, **condition: str) -> None:
        """Put it with a right checksum; again if a bit has flipped on the way, which says nothing of the store."""
        checksum = declare_bytes("md5", _BODY)
        for left in reversed(range(_TRIES)):
            try:
                async with self._request("PutObject", self._key):
                    await self._client.put_object(
                        **self._target, **self._write_arguments, **checksum, **condition, Body=_BODY
                    )
                return
            except StoreError as error:
                if error.kind is not ErrorKind.CORRUPTED_IN_TRANSIT or not left:
                    raise

    async def object_is_checked(self, integrity: str) -> bool:
        return await self._is_checked(self._refuses_put, integrity)

    async def wants_checksum(self) -> bool:
        """Return whether the store refuses what comes without a checksum, as buckets with Object Lock do."""
        return await self._refuses_put() and await self._refuses_put()

    async def part_is_checked(self, integrity: str) -> bool:
        upload = await self._begin_upload(integrity) or await self._begin_upload(integrity)
        if not upload:
            return False
        try:
            return await self._is_checked(partial(self._refuses_part, upload), integrity)
        finally:
            async with self._request("AbortMultipartUpload", self._key):
                await self._client.abort_multipart_upload(**self._target, UploadId=upload)

    async def _is_checked(self, refuses: Callable[..., Awaitable[bool]], integrity: str) -> bool:
        if not await refuses(**declare_bytes(integrity, _BODY, flip=1)):
            return False
        right = declare_bytes(integrity, _BODY)
        # Twice, as the upload above: a bit that flips in transit makes a store refuse what is right.
        return not (await refuses(**right) and await refuses(**right))

    async def _begin_upload(self, integrity: str) -> str:
        """Return the upload's id; empty if the store refuses the declaration."""
        try:
            async with self._request("CreateMultipartUpload", self._key):
                answer = await self._client.create_multipart_upload(
                    **self._target, **self._write_arguments, **declare_upload(integrity)
                )
        except StoreError as error:
            if error.kind in CHECKSUM_REFUSALS:
                return ""
            raise
        upload: str = answer["UploadId"]
        return upload

    async def _refuses_put(self, **arguments: str) -> bool:
        return await self._refuses(
            "PutObject", partial(self._client.put_object, **self._target, **self._write_arguments, **arguments)
        )

    async def _refuses_part(self, upload: str, **arguments: str) -> bool:
        return await self._refuses(
            "UploadPart",
            partial(self._client.upload_part, **self._target, UploadId=upload, PartNumber=1, **arguments),
        )

    async def _refuses(self, operation: str, send: Callable[..., Awaitable[object]]) -> bool:
        try:
            async with self._request(operation, self._key):
                await send(Body=_BODY)
        except StoreError as error:
            if error.kind in CHECKSUM_REFUSALS:
                return True
            raise
        return False

    async def clean_up(self) -> None:
        with ignored(ErrorKind.NOT_FOUND, ErrorKind.OBJECT_LOCKED):
            async with self._request("DeleteObject", self._key):
                await self._client.delete_object(**self._target)
