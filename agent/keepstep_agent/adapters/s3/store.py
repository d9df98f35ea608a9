"""Stores objects in S3 and in stores that imitate it.

Owns the operations of `ports.ObjectStore`. `listings` owns those with many pages, `bucket_rules` those about what the
bucket does by itself, `client` connecting and signing, `credentials` the keys, `integrity` what the store enforces and
how to use it, `errors` what errors mean, `transfer` how bytes move.

Invariants: nothing is retried, except once with new keys what the store refused with old ones; no request outlives the
store's time-outs, except a body that keeps moving at the minimum rate; no request waits in the HTTP library's pool,
where nothing bounds the wait.

An upload's token is S3's upload id; a receipt and a version are ETags, without quotes.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from io import BytesIO
from typing import Any, Final
from urllib.parse import urlencode

import structlog

from keepstep_agent.adapters.checksum import check_region, region_checksum
from keepstep_agent.adapters.rate_limit import RateLimiter
from keepstep_agent.adapters.region_file import RegionFile
from keepstep_agent.adapters.s3.bucket_rules import aborts_uploads, keeps_old_versions
from keepstep_agent.adapters.s3.client import connect, parse_destination
from keepstep_agent.adapters.s3.errors import FOREIGN, Place, ignored, translate
from keepstep_agent.adapters.s3.http_session import over_a_new_connection
from keepstep_agent.adapters.s3.integrity import (
    CHECKSUM_ALGORITHMS,
    CHECKSUM_REFUSALS,
    declare,
    declare_bytes,
    declare_upload,
    probe,
)
from keepstep_agent.adapters.s3.listings import Listings, etag_of, object_info
from keepstep_agent.adapters.transfer.direct import Body, DirectTransfer, Transfer
from keepstep_agent.adapters.transfer.stall_timeout import StallTimeout
from keepstep_agent.core.errors import ErrorKind, StoreError, checkpoint_corrupt, object_too_large
from keepstep_agent.core.model import Region
from keepstep_agent.core.settings.values import StoreSettings
from keepstep_agent.ports import ObjectInfo, PartInfo, StoreCapabilities, UploadInfo

logger = structlog.get_logger(__name__)

_THREADS: Final = 4
_GET_PIECE_BYTES: Final = 256 * 1024
_LARGE_BYTES: Final = 1024 * 1024


class S3Store:
    """See `ports.ObjectStore`. Made by `open_s3_store`."""

    def __init__(
        self,
        client: Any,
        settings: StoreSettings,
        limiter: RateLimiter,
        stack: AsyncExitStack,
        make_transfer: Callable[[ThreadPoolExecutor, RateLimiter], Transfer] = DirectTransfer,
    ) -> None:
        """`stack` holds the client; `close` unwinds it."""
        destination = parse_destination(settings.destination)
        self._client = client
        self._bucket = destination.bucket
        self._prefix = destination.prefix
        self._stack = stack
        self._secure = str(client.meta.endpoint_url).startswith("https:")
        self._stall_seconds = settings.connect_timeout_seconds + settings.read_timeout_seconds
        self._slots = asyncio.Semaphore(settings.max_connections)
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="keepstep-store")
        # One thread per connection: a body keeps it as long as the store takes or sends bytes.
        self._movers = ThreadPoolExecutor(settings.max_connections, thread_name_prefix="keepstep-bodies")
        self._transfer = make_transfer(self._movers, limiter)
        self._write_arguments = _write_arguments(settings)
        self._data_arguments = {"StorageClass": settings.storage_class} if settings.storage_class else {}
        self._listings = Listings(client, self._bucket, self._prefix, request=self._request, place=self._place)
        # Before the probe we assume nothing of the store and sign every payload.
        self.capabilities = StoreCapabilities(conditional_put=False, integrity="sha256")

    async def probe(self) -> StoreCapabilities:
        self.capabilities = await probe(
            self._client,
            self._bucket,
            self._prefix,
            write_arguments=self._write_arguments,
            fallback="none" if self._secure else "sha256",
            request=self._request,
        )
        if self.capabilities.integrity == "none":
            logger.warning(
                "store_checks_no_upload",
                bucket=self._bucket,
                endpoint=self._client.meta.endpoint_url,
                consequence="only TLS protects uploads in transit; restore verifies every byte",
            )
        return self.capabilities

    async def put(self, key: str, body: bytes, *, if_absent: bool = False) -> None:
        condition = {"IfNoneMatch": "*"} if if_absent and self.capabilities.conditional_put else {}
        # SeaweedFS, for one, accepts any signed SHA-256, and stores an empty object when the body never arrives.
        declared = declare_bytes(self.capabilities.integrity, body)
        if len(body) < _LARGE_BYTES:
            async with self._request("PutObject", key):
                await self._put_object(key, body, **declared, **condition)
            return
        # In pieces: the connection would copy all of it.
        signature = await self._run(_sha256, body)
        async with self._request("PutObject", key) as stall:
            pieces = self._transfer.bytes_body(body, payload_signature=signature, stall=stall)
            await self._put_object(key, pieces, **declared, **condition)
        self._check_sent(pieces, "PutObject", key)

    async def put_data(self, key: str, content: Region | bytearray, checksum: int) -> None:
        if isinstance(content, bytearray):
            signature, declared = await self._run(declare, self.capabilities.integrity, content, checksum)
            async with self._request("PutObject", key) as stall:
                body = self._transfer.bytes_body(content, payload_signature=signature, stall=stall)
                await self._put_object(key, body, **declared, **self._data_arguments)
            self._check_sent(body, "PutObject", key)
        elif content.size_bytes:
            async with self._sending("PutObject", key, content, checksum) as (body, declared):
                await self._put_object(key, body, **declared, **self._data_arguments)
        else:
            await self._run(region_checksum, content)
            await self.put(key, b"")

    async def create_upload(self, key: str) -> str:
        async with self._request("CreateMultipartUpload", key):
            answer = await self._client.create_multipart_upload(
                **self._target(key),
                **declare_upload(self.capabilities.integrity),
                **self._write_arguments,
                **self._data_arguments,
            )
            return str(answer["UploadId"])

    async def put_part(self, key: str, upload: str, number: int, region: Region, checksum: int) -> str:
        async with self._sending("UploadPart", key, region, checksum) as (body, declared):
            answer = await self._client.upload_part(
                **self._target(key), UploadId=upload, PartNumber=number, Body=body, **declared
            )
            return _written(answer)

    async def list_parts(self, key: str, upload: str) -> Sequence[PartInfo]:
        return [part async for part in self._listings.parts(key, upload)]

    async def complete_upload(self, key: str, upload: str, receipts: Sequence[str]) -> None:
        parts = [{"PartNumber": number, "ETag": f'"{etag}"'} for number, etag in enumerate(receipts, start=1)]
        try:
            async with self._request("CompleteMultipartUpload", key):
                answer = await self._client.complete_multipart_upload(
                    **self._target(key), UploadId=upload, MultipartUpload={"Parts": parts}
                )
                _written(answer)
        except StoreError as error:
            if error.kind is ErrorKind.STORE_FAILED:
                # Ceph answers 500 for an upload that was aborted, every time.
                await self._check_upload(key, upload)
            raise

    async def abort_upload(self, key: str, upload: str) -> None:
        with ignored(ErrorKind.UPLOAD_LOST):
            async with self._request("AbortMultipartUpload", key):
                await self._client.abort_multipart_upload(**self._target(key), UploadId=upload)

    def list_folders(self, prefix: str) -> AsyncIterator[str]:
        return self._listings.folders(prefix)

    def list_uploads(self, prefix: str) -> AsyncIterator[UploadInfo]:
        return self._listings.uploads(prefix)

    async def aborts_uploads(self) -> bool:
        return await aborts_uploads(self._client, self._bucket, self._prefix, request=self._request)

    async def keeps_old_versions(self) -> bool:
        return await keeps_old_versions(self._client, self._bucket, self._prefix, request=self._request)

    async def head(self, key: str) -> ObjectInfo:
        try:
            async with self._request("HeadObject", key):
                answer = await self._client.head_object(**self._target(key))
        except StoreError as error:
            if _status(error) != 404:
                raise
            # The answer to a HEAD has no body: it says neither what is missing nor whether the store itself answered.
            async with self._request("GetObject", key):
                answer = await self._client.get_object(**self._target(key))
                async with answer["Body"]:
                    pass
        return object_info(key, answer, size_bytes=answer["ContentLength"])

    async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
        async with self._request("GetObject", key) as stall:
            with over_a_new_connection() if fresh else nullcontext():
                answer = await self._client.get_object(**self._target(key))
            async with answer["Body"] as body:
                if answer["ContentLength"] > limit_bytes:
                    raise object_too_large(self._place(key), answer["ContentLength"], limit_bytes)
                stall.moved()
                # Unlike a list of pieces, it is not in memory twice at the end.
                content = BytesIO()
                while piece := await body.read(_GET_PIECE_BYTES):
                    stall.received(len(piece))
                    content.write(piece)
                return content.getvalue()

    async def get_into(self, key: str, *, offset_bytes: int, size_bytes: int, version: str, descriptor: int) -> int:
        try:
            async with self._request("GetObject", key) as stall:
                answer = await self._client.get_object(
                    **self._target(key),
                    Range=f"bytes={offset_bytes}-{offset_bytes + size_bytes - 1}",
                    IfMatch=f'"{version}"',
                )
                async with answer["Body"] as body:
                    # Some stores ignore conditions or ranges and report success.
                    if etag_of(answer) != version:
                        raise self._corrupt(key, f"its ETag is {etag_of(answer)} instead of {version}")
                    if answer["ContentLength"] != size_bytes or not _begins_at(answer, offset_bytes):
                        raise self._corrupt(key, f"bytes {offset_bytes} to {offset_bytes + size_bytes} do not exist")
                    return await self._transfer.receive(
                        body.raw_stream,
                        descriptor,
                        offset_bytes=offset_bytes,
                        size_bytes=size_bytes,
                        stall=stall,
                    )
        except StoreError as error:
            if error.kind is ErrorKind.ALREADY_EXISTS:  # 412: here the condition was the ETag
                raise self._corrupt(key, f"its ETag is no longer {version}") from error
            if _status(error) == 416:
                raise self._corrupt(key, f"it ends before byte {offset_bytes}") from error
            raise

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        return self._listings.objects(prefix)

    async def delete(self, key: str) -> None:
        with ignored(ErrorKind.NOT_FOUND):
            async with self._request("DeleteObject", key):
                await self._client.delete_object(**self._target(key))

    async def close(self) -> None:
        await self._stack.aclose()
        self._executor.shutdown(wait=False)
        self._movers.shutdown(wait=False)

    @asynccontextmanager
    async def _request(self, operation: str, key: str) -> AsyncIterator[StallTimeout]:
        """Give a request what all requests share: a slot, the stall time-out, translated errors."""
        async with self._slots:
            try:
                async with StallTimeout(self._stall_seconds) as stall:
                    yield stall
            except FOREIGN as error:
                raise translate(error, operation, self._place(key)) from error

    @asynccontextmanager
    async def _sending(
        self, operation: str, key: str, region: Region, checksum: int
    ) -> AsyncIterator[tuple[Body, dict[str, str]]]:
        """Give a body for `region` and the arguments by which the store verifies it.

        An error of the file takes precedence over the store's.
        """
        file = RegionFile(region)
        try:
            signature, integrity = await self._run(self._open_declared, file, region, checksum)
            body: Body | None = None
            try:
                async with self._request(operation, key) as stall:
                    body = self._transfer.body(
                        file,
                        region,
                        checksum,
                        payload_signature=signature,
                        stall=stall,
                        store_verifies=self.capabilities.integrity in CHECKSUM_ALGORITHMS,
                    )
                    yield body, integrity
                if body.failure:
                    raise body.failure
                self._check_sent(body, operation, key)
            except StoreError as error:
                if body and body.failure:
                    raise body.failure from error
                if error.kind in CHECKSUM_REFUSALS:
                    await self._run(check_region, region, checksum)
                raise
        finally:
            await asyncio.shield(self._run(file.close))

    def _open_declared(self, file: RegionFile, region: Region, checksum: int) -> tuple[str, dict[str, str]]:
        declared = declare(self.capabilities.integrity, region, checksum)
        file.open()
        return declared

    def _check_sent(self, body: Body, operation: str, key: str) -> None:
        if not body.sent_whole:
            raise StoreError(
                ErrorKind.STORE_FAILED, f"{operation} {self._place(key)}: answered before the whole body was sent"
            )

    async def _run(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    async def _check_upload(self, key: str, upload: str) -> None:
        """Raise UPLOAD_LOST if the store does not know the upload. Other errors are ignored: they say nothing of it."""
        try:
            await self.list_parts(key, upload)
        except StoreError as error:
            if error.kind is ErrorKind.UPLOAD_LOST:
                raise

    async def _put_object(self, key: str, body: object, **arguments: str) -> None:
        _written(await self._client.put_object(**self._target(key), Body=body, **arguments, **self._write_arguments))

    def _target(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _place(self, key: str) -> Place:
        return Place(bucket=self._bucket, key=self._prefix + key, endpoint=self._client.meta.endpoint_url)

    def _corrupt(self, key: str, reason: str) -> StoreError:
        return checkpoint_corrupt(f"{self._place(key)} is not what was written: {reason}")


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


async def open_s3_store(
    settings: StoreSettings,
    limiter: RateLimiter,
    make_transfer: Callable[[ThreadPoolExecutor, RateLimiter], Transfer] = DirectTransfer,
) -> S3Store:
    """Open a store, which the caller must close. Raises BAD_CONFIGURATION if the settings cannot work."""
    parse_destination(settings.destination)
    async with AsyncExitStack() as stack:
        client = await connect(settings, stack)
        return S3Store(client, settings, limiter, stack.pop_all(), make_transfer)
    raise AssertionError("unreachable")


def _write_arguments(settings: StoreSettings) -> dict[str, str]:
    arguments: dict[str, str] = {}
    if settings.server_side_encryption:
        arguments["ServerSideEncryption"] = settings.server_side_encryption
    if settings.kms_key_id:
        arguments["SSEKMSKeyId"] = settings.kms_key_id
    if settings.tags:
        arguments["Tagging"] = urlencode(settings.tags)
    return arguments


def _written(answer: Mapping[str, Any]) -> str:
    """Return the ETag of a written object. Raises KeyError if there is none: something other than S3 answered."""
    return str(answer["ETag"]).strip('"')


def _begins_at(answer: Mapping[str, Any], offset_bytes: int) -> bool:
    content_range = str(answer.get("ContentRange", "bytes 0-"))
    return content_range.startswith(f"bytes {offset_bytes}-")


def _status(error: StoreError) -> int:
    response = getattr(error.__cause__, "response", None) or {}
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
