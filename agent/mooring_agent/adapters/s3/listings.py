"""Lists objects, multipart uploads and the parts of one upload, page by page.

Invariant: every listing ends, whatever answers. Each page has the time and size limits of any answer. A listing has a
limit on entries and on time, and never continues at the same place twice. The order of keys is not checked: SeaweedFS
lists by folder.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

from mooring_agent.adapters.s3.errors import Place
from mooring_agent.core.errors import ErrorKind, StoreError
from mooring_agent.ports import ObjectInfo, PartInfo, UploadInfo

MOST_ENTRIES: Final = 1_000_000
MOST_SECONDS: Final = 1800.0
"""Time spent in requests. The time that the caller spends on the entries does not count."""

_Request = Callable[[str, str], AbstractAsyncContextManager[object]]


class Listings:
    """Lists what is below one destination's prefix. Keys are relative to it.

    `request` wraps each request: it takes a slot, bounds the time and translates errors.
    """

    def __init__(
        self, client: Any, bucket: str, prefix: str, *, request: _Request, place: Callable[[str], Place]
    ) -> None:
        self._client = client
        self._bucket = bucket
        self._prefix = prefix
        self._request = request
        self._place = place

    async def objects(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        bounds = _Bounds("ListObjectsV2", self._place(prefix))
        token = ""
        while True:
            async with self._request("ListObjectsV2", prefix), bounds.page():
                answer = await self._client.list_objects_v2(
                    Bucket=self._bucket,
                    Prefix=self._prefix + prefix,
                    **({"ContinuationToken": token} if token else {}),
                )
                found = [
                    ObjectInfo(
                        key=self._key(one, prefix),
                        size_bytes=one["Size"],
                        etag=str(one.get("ETag", "")).strip('"'),
                        modified_at=one["LastModified"].timestamp(),
                    )
                    for one in answer.get("Contents", [])
                ]
                # Every S3 sends this. Without the check, a page of something else would read as an empty listing.
                truncated = answer["IsTruncated"]
            bounds.count(found)
            for info in found:
                yield info
            if not truncated:
                return
            token = str(answer.get("NextContinuationToken", ""))
            bounds.go_on_at(token)

    async def uploads(self, prefix: str) -> AsyncIterator[UploadInfo]:
        bounds = _Bounds("ListMultipartUploads", self._place(prefix))
        markers: dict[str, str] = {}
        while True:
            try:
                async with self._request("ListMultipartUploads", prefix), bounds.page():
                    answer = await self._client.list_multipart_uploads(
                        Bucket=self._bucket, Prefix=self._prefix + prefix, **markers
                    )
                    found = [
                        UploadInfo(
                            key=self._key(one, prefix),
                            upload_id=one["UploadId"],
                            started_at=one["Initiated"].timestamp(),
                        )
                        for one in answer.get("Uploads", [])
                    ]
            except StoreError as error:
                if error.kind is ErrorKind.UPLOAD_LOST:
                    return  # rclone says so that there are none
                raise
            bounds.count(found)
            for upload in found:
                yield upload
            if not answer.get("IsTruncated"):
                return
            markers = {name: str(answer.get(f"Next{name}", "")) for name in ("KeyMarker", "UploadIdMarker")}
            bounds.go_on_at("\0".join(markers.values()).strip("\0"))

    async def parts(self, key: str, upload_id: str) -> Sequence[PartInfo]:
        bounds = _Bounds("ListParts", self._place(key))
        parts: list[PartInfo] = []
        marker = 0
        while True:
            async with self._request("ListParts", key), bounds.page():
                answer = await self._client.list_parts(
                    Bucket=self._bucket, Key=self._prefix + key, UploadId=upload_id, PartNumberMarker=marker
                )
                found = [
                    PartInfo(number=one["PartNumber"], size_bytes=one["Size"], etag=str(one.get("ETag", "")).strip('"'))
                    for one in answer.get("Parts", [])
                ]
                marker = int(answer.get("NextPartNumberMarker", 0))
            bounds.count(found)
            parts += found
            if not answer.get("IsTruncated"):
                return parts
            bounds.go_on_at(str(marker or ""))

    def _key(self, entry: Mapping[str, Any], prefix: str) -> str:
        """Return the key relative to the destination. Raises ValueError if it does not begin with `prefix`."""
        key = str(entry["Key"])
        if not key.startswith(self._prefix + prefix):
            raise ValueError(f"it lists {key!r}, which does not begin with {self._prefix + prefix!r}")
        return key[len(self._prefix) :]


class _Bounds:
    """The limits on one listing. Raises StoreError when the listing exceeds one."""

    def __init__(self, operation: str, place: Place) -> None:
        self._what = f"{operation} {place}"
        self._entries = 0
        self._seconds = 0.0
        self._places = {""}

    @asynccontextmanager
    async def page(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        yield
        self._seconds += loop.time() - began_at

    def count(self, entries: Sequence[object]) -> None:
        self._entries += len(entries)
        if self._entries > MOST_ENTRIES:
            raise self._endless(f"the listing has more than {MOST_ENTRIES} entries")

    def go_on_at(self, place: str) -> None:
        """Check that the listing may continue at `place`: not empty, not repeated, and within the time."""
        if place in self._places:
            raise StoreError(
                ErrorKind.STORE_FAILED,
                f"{self._what}: the store says that the listing goes on, but gives no new place to continue at",
            )
        self._places.add(place)
        if self._seconds > MOST_SECONDS:
            raise self._endless(f"the listing takes longer than {MOST_SECONDS:.0f} seconds")

    def _endless(self, reason: str) -> StoreError:
        # Not a passing failure: a retry would begin the listing anew.
        return StoreError(
            ErrorKind.REQUEST_REFUSED,
            f"{self._what}: {reason}",
            hint="give each run a prefix of its own; if it has one, something other than the store answers",
        )
