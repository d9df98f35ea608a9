"""The reference for how bytes move: bodies as bytes, whole in memory, by nothing but aiobotocore's own means.

    python -m tests.harness.plain_transfer ARGUMENTS OF keepstep

runs the command line with it, so that what holds of the direct way can be seen to hold of this one, too.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp

from keepstep_agent.adapters.checksum import crc64nvme, require_checksum
from keepstep_agent.adapters.rate_limit import RateLimiter
from keepstep_agent.adapters.region_file import RegionFile
from keepstep_agent.adapters.s3 import store
from keepstep_agent.adapters.transfer.stall_timeout import StallTimeout
from keepstep_agent.adapters.volume.errors import volume_error
from keepstep_agent.core.errors import KeepstepError
from keepstep_agent.core.model import Region


class PlainBody(bytes):
    """Bytes, and what the signer wants to know."""

    failure: KeepstepError | None = None
    sent_whole = True
    payload_signature: str = ""


class PlainTransfer:
    """See `direct.Transfer`. Reads and writes on the event loop, and knows no cap on the bandwidth."""

    def __init__(self, executor: ThreadPoolExecutor, limiter: RateLimiter) -> None:
        """Neither is used."""

    def body(
        self, file: RegionFile, region: Region, checksum: int, *, payload_signature: str, **_: object
    ) -> PlainBody:
        data = bytearray(region.size_bytes)
        file.read_into(0, memoryview(data))
        file.check()
        require_checksum(region, crc64nvme(data), checksum)
        body = PlainBody(data)
        body.payload_signature = payload_signature
        return body

    def bytes_body(self, data: bytes | bytearray, *, payload_signature: str, **_: object) -> PlainBody:
        body = PlainBody(data)
        body.payload_signature = payload_signature
        return body

    async def receive(
        self,
        response: aiohttp.ClientResponse,
        descriptor: int,
        *,
        offset_bytes: int,
        size_bytes: int,
        stall: StallTimeout,
    ) -> int:
        pieces = []
        stall.moved()
        while piece := await response.content.readany():
            stall.received(len(piece))
            pieces.append(piece)
        data = b"".join(pieces)
        if len(data) != size_bytes:
            raise aiohttp.ClientPayloadError(f"{len(data)} bytes arrived instead of {size_bytes}")
        try:
            # By a description of its own: the caller's may be one that takes whole blocks alone.
            into = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY)
            try:
                os.pwrite(into, data, offset_bytes)
            finally:
                os.close(into)
        except OSError as error:
            raise volume_error(error, "write the file being restored") from error
        return crc64nvme(data)


def _open_plain(really_open: Any) -> Any:
    async def open_plain(settings: object, limiter: object) -> object:
        return await really_open(settings, limiter, PlainTransfer)

    return open_plain


if __name__ == "__main__":
    from keepstep_agent.__main__ import main

    store.open_s3_store = _open_plain(store.open_s3_store)
    main()
