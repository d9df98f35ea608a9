"""Moves bytes between the files of a volume and a store's connections.

Each store has its own transfer, with its buffers and with the threads that do what would block.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol

import aiohttp
from aiohttp.payload import PAYLOAD_REGISTRY

from keepstep_agent.adapters.rate_limit import RateLimiter
from keepstep_agent.adapters.region_file import RegionFile
from keepstep_agent.adapters.transfer.receiving import download
from keepstep_agent.adapters.transfer.sending import BodyPayload
from keepstep_agent.adapters.transfer.stall_timeout import StallTimeout
from keepstep_agent.adapters.transfer.upload_body import BUFFER_BYTES, BufferPool, BytesBody, FileBody, UploadBody
from keepstep_agent.core.errors import KeepstepError
from keepstep_agent.core.model import Region

_INCOMING_BYTES: Final = 2 * 1024 * 1024

PAYLOAD_REGISTRY.register(BodyPayload, UploadBody)


class Body(Protocol):
    """What aiobotocore is given to send. `failure` says why it could not be sent, unless the connection broke."""

    failure: KeepstepError | None
    sent_whole: bool
    payload_signature: str


class Transfer(Protocol):
    """How an S3 store moves the bytes of files. The tests have a second one, with plain bodies, to compare with."""

    def body(
        self,
        file: RegionFile,
        region: Region,
        checksum: int,
        *,
        payload_signature: str,
        stall: StallTimeout,
        store_verifies: bool,
    ) -> Body:
        """Make the body of an upload. The arguments are those of FileBody."""

    def bytes_body(self, data: bytes | bytearray, *, payload_signature: str, stall: StallTimeout) -> Body:
        """Make the body of an upload. The arguments are those of BytesBody."""

    async def receive(
        self,
        response: aiohttp.ClientResponse,
        descriptor: int,
        *,
        offset_bytes: int,
        size_bytes: int,
        stall: StallTimeout,
    ) -> int:
        """Like `receiving.download`."""


class DirectTransfer:
    """See Transfer."""

    def __init__(self, executor: ThreadPoolExecutor, limiter: RateLimiter) -> None:
        """`executor` has a thread for each connection: a body keeps one as long as it is on the wire."""
        self._executor = executor
        self._limiter = limiter
        self._outgoing = BufferPool(BUFFER_BYTES)
        self._incoming = BufferPool(_INCOMING_BYTES)

    def body(self, file: RegionFile, region: Region, checksum: int, **options: Any) -> FileBody:
        return FileBody(
            file, region, checksum, buffers=self._outgoing, executor=self._executor, limiter=self._limiter, **options
        )

    def bytes_body(self, data: bytes | bytearray, *, payload_signature: str, stall: StallTimeout) -> BytesBody:
        return BytesBody(data, limiter=self._limiter, payload_signature=payload_signature, stall=stall)

    async def receive(self, response: aiohttp.ClientResponse, descriptor: int, **options: Any) -> int:
        return await download(response, descriptor, buffers=self._incoming, executor=self._executor, **options)
