"""Lists objects, folders, multipart uploads and the parts of one upload, page by page.

Invariant: every listing ends, whatever answers. Each page has the time and size limits of any answer. A listing has a
limit on entries and on time, and never continues at the same place twice. The order of keys is not checked: SeaweedFS
lists by folder.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeVar

from keepstep_agent.adapters.s3.errors import Place, ignored
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.ports import ObjectInfo, PartInfo, UploadInfo

MOST_ENTRIES: Final = 1_000_000
MOST_SECONDS: Final = 1800.0
"""Time spent in requests. The time that the caller spends on the entries does not count."""

_Entry = TypeVar("_Entry")
_Request = Callable[[str, str], AbstractAsyncContextManager[object]]


def etag_of(entry: Mapping[str, Any]) -> str:
    """Return the ETag without its quotes; empty if the store sends none."""
    return str(entry.get("ETag", "")).strip('"')


def object_info(key: str, entry: Mapping[str, Any], size_bytes: int) -> ObjectInfo:
    """Return what the answer to a HEAD, or an entry of a listing, says about an object."""
    etag = etag_of(entry)
    modified_at = entry["LastModified"].timestamp()
    return ObjectInfo(key=key, size_bytes=size_bytes, modified_at=modified_at, version=etag, md5=_md5(etag))


def _md5(etag: str) -> str:
    """Return the ETag if it may be the MD5 of the bytes, as most stores make it for what was sent in one piece."""
    return etag if re.fullmatch("[0-9a-fA-F]{32}", etag) else ""


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

    def objects(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        def read(answer: Mapping[str, Any]) -> list[ObjectInfo]:
            return [object_info(self._key(one["Key"], prefix), one, one["Size"]) for one in _contents(answer)]

        return self._pages("ListObjectsV2", prefix, self._client.list_objects_v2, read, markers=["ContinuationToken"])

    async def folders(self, prefix: str) -> AsyncIterator[str]:
        def read(answer: Mapping[str, Any]) -> list[str]:
            # The objects beside the folders count for the limit on entries.
            beside = [""] * len(_contents(answer))
            return beside + [self._key(one["Prefix"], prefix) for one in answer.get("CommonPrefixes", [])]

        call, markers = self._client.list_objects_v2, ["ContinuationToken"]
        what = {"Prefix": self._prefix + prefix, "Delimiter": "/"}
        async for folder in self._pages("ListObjectsV2", prefix, call, read, markers=markers, **what):
            if folder.endswith("/"):
                yield folder

    async def uploads(self, prefix: str) -> AsyncIterator[UploadInfo]:
        def read(answer: Mapping[str, Any]) -> list[UploadInfo]:
            return [
                UploadInfo(
                    key=self._key(one["Key"], prefix), upload=one["UploadId"], started_at=one["Initiated"].timestamp()
                )
                for one in answer.get("Uploads", [])
            ]

        call, markers = self._client.list_multipart_uploads, ["KeyMarker", "UploadIdMarker"]
        with ignored(ErrorKind.UPLOAD_LOST):  # rclone says so if there are none
            async for upload in self._pages("ListMultipartUploads", prefix, call, read, markers=markers):
                yield upload

    def parts(self, key: str, upload: str) -> AsyncIterator[PartInfo]:
        def read(answer: Mapping[str, Any]) -> list[PartInfo]:
            return [
                PartInfo(number=one["PartNumber"], size_bytes=one["Size"], receipt=etag, md5=_md5(etag))
                for one in answer.get("Parts", [])
                for etag in [etag_of(one)]
            ]

        call, markers = self._client.list_parts, ["PartNumberMarker"]
        return self._pages("ListParts", key, call, read, markers=markers, Key=self._prefix + key, UploadId=upload)

    async def _pages(
        self,
        operation: str,
        key: str,
        call: Callable[..., Any],
        read: Callable[[Mapping[str, Any]], list[_Entry]],
        *,
        markers: list[str],
        **what: str,
    ) -> AsyncIterator[_Entry]:
        """Yield the entries of all pages. `markers` are the arguments that say where the next page begins.

        Raises StoreError when the listing exceeds a limit.
        """
        what = what or {"Prefix": self._prefix + key}
        name = f"{operation} {self._place(key)}"
        loop = asyncio.get_running_loop()
        entries, seconds, marker, places = 0, 0.0, dict[str, Any](), {""}
        while True:
            async with self._request(operation, key):
                began_at = loop.time()
                answer = await call(Bucket=self._bucket, **what, **marker)
                found = read(answer)
                seconds += loop.time() - began_at
            entries += len(found)
            if entries > MOST_ENTRIES:
                raise _endless(f"{name}: the listing has more than {MOST_ENTRIES} entries")
            for one in found:
                yield one
            if not answer.get("IsTruncated"):
                return
            marker = {argument: answer.get(f"Next{argument}") or "" for argument in markers}
            place = "\0".join(map(str, marker.values())).strip("\0")
            if place in places:
                raise StoreError(
                    ErrorKind.STORE_FAILED,
                    f"{name}: the store says that the listing goes on, but gives no new place to continue at",
                )
            places.add(place)
            if seconds > MOST_SECONDS:
                raise _endless(f"{name}: the listing takes longer than {MOST_SECONDS:.0f} seconds")

    def _key(self, listed: object, prefix: str) -> str:
        """Return the key relative to the destination. Raises ValueError if it does not begin with `prefix`."""
        key = str(listed)
        if not key.startswith(self._prefix + prefix):
            raise ValueError(f"it lists {key!r}, which does not begin with {self._prefix + prefix!r}")
        return key[len(self._prefix) :]


def _contents(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the objects of a page. Raises KeyError if the answer is no page of a listing."""
    # Every S3 sends this. Without the check, a page of something else would read as an empty listing.
    if "IsTruncated" not in answer:
        raise KeyError("IsTruncated")
    found: list[Mapping[str, Any]] = answer.get("Contents", [])
    return found


def _endless(message: str) -> StoreError:
    # Not a passing failure: a retry would begin the listing anew.
    hint = "name a longer prefix, one for each run; if it is one run's alone, something other than the store answers"
    return StoreError(ErrorKind.REQUEST_REFUSED, message, hint=hint)
