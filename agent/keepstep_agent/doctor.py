"""Examines a destination and says in plain words what is right and what is wrong with it.

Runs its checks on the real store, below `.keepstep/probe/`, and removes what it wrote. Invariants: every operation is
bounded. A failed check does not hide the next ones, unless the store cannot be reached or written at all.
"""

import asyncio
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, TypeVar

from keepstep_agent.adapters.checksum import region_checksum
from keepstep_agent.adapters.control_group import cpu_limit
from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.adapters.volume.shared_volume import fingerprint
from keepstep_agent.catalog.object_reads import for_each
from keepstep_agent.core.errors import ErrorKind, KeepstepError, StoreError
from keepstep_agent.core.model import Region
from keepstep_agent.core.settings.values import MIB, StoreSettings
from keepstep_agent.core.stored.object_layout import PROBE_PREFIX
from keepstep_agent.ports import ObjectStore, StoreReader, StoreWriter

_Result = TypeVar("_Result")

OPERATION_SECONDS: Final = 60.0
_PART_BYTES: Final = 8 * MIB
_PARTS: Final = 4
_MOST_SKEW_SECONDS: Final = 300.0
"""Stores refuse signatures that are 15 minutes off. A smaller skew matters too: it distorts the ages of objects."""
_SLOW_BYTES_PER_SECOND: Final = 10 * MIB
_UNREACHED: Final = frozenset(
    {ErrorKind.UNREACHABLE, ErrorKind.TIMED_OUT, ErrorKind.BUCKET_MISSING, ErrorKind.BAD_CONFIGURATION}
)


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check and its result; `hint` is what the user can do about it."""

    name: str
    verdict: Verdict
    detail: str
    hint: str = ""


async def examine(settings: StoreSettings) -> AsyncIterator[Finding]:
    """Yield findings as they come. What is wrong with the destination is a finding, never an exception."""
    if limit := cpu_limit():
        hint = "no drain is faster than this; in a pod, raise keepstep.dev/cpu"
        yield _ok("cpu", str(limit), hint)
    try:
        async with open_store(settings) as store:
            async for finding in _examine(store, settings):
                yield finding
    except KeepstepError as error:
        yield _failed("settings", error)


async def _examine(store: ObjectStore, settings: StoreSettings) -> AsyncIterator[Finding]:
    key = f"{PROBE_PREFIX}doctor-{secrets.token_hex(8)}"
    try:
        await _bounded(_first_key(store))
        listed = _ok("list", "objects can be listed")
    except KeepstepError as error:
        if error.kind in _UNREACHED or not getattr(error, "sent", True):
            yield _failed("reachable", error)
            return
        listed = _failed("list", error)
    yield _ok("reachable", f"{settings.destination} answers")
    yield listed
    written = await _try("put", "objects can be written and replaced", _write_twice(store, key))
    yield written
    if written.verdict is Verdict.FAIL:
        return
    yield await _try("get", "objects can be read", store.get(key, limit_bytes=1024))
    yield await _examine_clock(store, key)
    yield await _examine_deletion(store, key)
    async for finding in _examine_guarantees(store):
        yield finding
    async for finding in _examine_rules(store):
        yield finding
    async for finding in _examine_transfer(store, key):
        yield finding


async def _write_twice(store: StoreWriter, key: str) -> None:
    """Agents replace their lease and their notes, which a retention policy of the whole bucket may refuse."""
    for body in (b"Keepstep is here.", b"Keepstep was here."):
        await store.put(key, body)


async def _examine_deletion(store: StoreWriter, key: str) -> Finding:
    try:
        await _bounded(store.delete(key))
    except KeepstepError as error:
        if error.kind is ErrorKind.OBJECT_LOCKED:
            return _warn("delete", f"the store's own retention protects objects: {error}", error.hint)
        return _failed("delete", error)
    return _ok("delete", "objects can be deleted")


async def _examine_clock(store: StoreReader, key: str) -> Finding:
    try:
        skew_seconds = (await _bounded(store.head(key))).modified_at - time.time()
    except KeepstepError as error:
        return _failed("clock", error)
    if abs(skew_seconds) <= _MOST_SKEW_SECONDS:
        return _ok("clock", f"the store's clock is within {_MOST_SKEW_SECONDS:.0f} s of ours")
    return _warn(
        "clock",
        f"the store's clock differs from ours by {skew_seconds:+.0f} s",
        "set this machine's clock (NTP); stores refuse signatures that are more than 15 minutes off",
    )


async def _examine_guarantees(store: StoreWriter) -> AsyncIterator[Finding]:
    try:
        capabilities = await _bounded(store.probe())
    except KeepstepError as error:
        yield _failed("probe", error)
        return
    if capabilities.conditional_put:
        yield _ok("conditional writes", "the store honours If-None-Match")
    else:
        yield _warn(
            "conditional writes",
            "the store ignores If-None-Match: pod 0 chooses what to resume from",
        )
    match capabilities.integrity:
        case "none":
            yield _warn(
                "integrity",
                "the store verifies no checksums: TLS alone protects uploads; restore verifies every byte",
            )
        case "sha256":
            yield _warn(
                "integrity",
                "the store verifies neither CRC64NVME nor CRC32C: uploads take SHA-256, at more CPU",
            )
        case "md5":
            yield _warn(
                "integrity",
                "the store wants Content-MD5 with every write and verifies no CRC: uploads take MD5, at more CPU",
            )
        case checksum:
            yield _ok("integrity", f"the store refuses bytes whose {checksum} is wrong")


async def _examine_rules(store: ObjectStore) -> AsyncIterator[Finding]:
    """Say what piles up unseen. This is advice: the destination works all the same."""
    uploads = "unfinished uploads"
    try:
        aborts_uploads = await _bounded(store.aborts_uploads())
        if aborts_uploads:
            yield _ok(uploads, "a lifecycle rule aborts them")
        elif aborts_uploads is not None:
            yield _warn(
                uploads,
                "no lifecycle rule aborts them, and what they take is in no listing",
                "add a rule with AbortIncompleteMultipartUpload, such as after 7 days; `keepstep du` shows what there "
                "is, `keepstep prune` aborts old ones",
            )
    except KeepstepError as error:
        yield _undetermined(uploads, error, "s3:GetLifecycleConfiguration")
    versions = "old versions"
    try:
        keeps_versions = await _bounded(store.keeps_old_versions())
        if keeps_versions:
            yield _warn(
                versions,
                "the bucket has versioning, and no lifecycle rule removes old versions: what is deleted takes room "
                "for ever",
                "add a rule with NoncurrentVersionExpiration",
            )
        elif keeps_versions is not None:
            yield _ok(versions, "they do not stay for ever")
    except KeepstepError as error:
        yield _undetermined(versions, error, "s3:GetBucketVersioning and s3:GetLifecycleConfiguration")


async def _examine_transfer(store: ObjectStore, key: str) -> AsyncIterator[Finding]:
    """Check multipart uploads, and measure how fast bytes are uploaded and downloaded."""
    with tempfile.TemporaryDirectory(prefix="keepstep-doctor-") as directory:
        source, target = Path(directory, "up"), Path(directory, "down")
        parts = await asyncio.to_thread(_make_parts, source)
        try:
            seconds = await _timed(_upload(store, key, parts))
        except KeepstepError as error:
            yield _failed("multipart", error)
            return
        yield _ok("multipart", "objects can be written in parts")
        yield _speed("upload", seconds)
        try:
            yield _speed("download", await _timed(_download(store, key, parts, target)))
        except KeepstepError as error:
            yield _failed("download", error)
        finally:
            removed = await _examine_deletion(store, key)
        if removed.verdict is Verdict.FAIL:
            yield removed


def _make_parts(source: Path) -> list[tuple[Region, int]]:
    source.write_bytes(os.urandom(_PARTS * _PART_BYTES))
    status = source.stat()
    regions = [
        Region(
            volume=str(source.parent),
            path=source.name,
            offset_bytes=offset,
            size_bytes=_PART_BYTES,
            fingerprint=fingerprint(status),
        )
        for offset in range(0, _PARTS * _PART_BYTES, _PART_BYTES)
    ]
    return [(region, region_checksum(region)) for region in regions]


async def _upload(store: ObjectStore, key: str, parts: list[tuple[Region, int]]) -> None:
    upload = await store.create_upload(key)
    receipts: dict[int, str] = {}

    async def send(number: int) -> None:
        region, checksum = parts[number - 1]
        receipts[number] = await store.put_part(key, upload, number, region, checksum)

    try:
        await for_each(range(1, _PARTS + 1), send, at_once=_PARTS)
        await store.complete_upload(key, upload, [receipts[number] for number in sorted(receipts)])
    except BaseException:
        await store.abort_upload(key, upload)
        raise


async def _download(store: StoreReader, key: str, parts: list[tuple[Region, int]], target: Path) -> None:
    version = (await store.head(key)).version
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    async def receive(part: tuple[Region, int]) -> None:
        region, sent = part
        received = await store.get_into(
            key,
            offset_bytes=region.offset_bytes,
            size_bytes=region.size_bytes,
            version=version,
            descriptor=descriptor,
        )
        if received != sent:
            raise StoreError(
                ErrorKind.CORRUPTED_IN_TRANSIT,
                "the store returned other bytes than those that were sent",
                hint="something on the way to the store changes bytes: a proxy, a network card or memory",
            )

    try:
        os.posix_fallocate(descriptor, 0, _PARTS * _PART_BYTES)
        await for_each(parts, receive, at_once=_PARTS)
    finally:
        os.close(descriptor)


async def _timed(work: Awaitable[None]) -> float:
    """Return the seconds that the work took."""
    start = time.monotonic()
    await _bounded(work)
    return time.monotonic() - start


def _speed(name: str, seconds: float) -> Finding:
    rate = _PARTS * _PART_BYTES / seconds
    detail = f"{rate / MIB:.0f} MiB/s ({_PARTS * _PART_BYTES // MIB} MiB in {seconds:.1f} s)"
    if rate >= _SLOW_BYTES_PER_SECOND:
        return _ok(name, detail)
    hint = "large checkpoints do not fit into a grace period: use a nearer endpoint or a longer grace period"
    return _warn(name, detail, hint)


async def _try(name: str, success: str, operation: Awaitable[object]) -> Finding:
    try:
        await _bounded(operation)
    except KeepstepError as error:
        return _failed(name, error)
    return _ok(name, success)


async def _bounded(operation: Awaitable[_Result]) -> _Result:
    try:
        async with asyncio.timeout(OPERATION_SECONDS):
            return await operation
    except TimeoutError as error:
        raise StoreError(ErrorKind.TIMED_OUT, f"not finished after {OPERATION_SECONDS:.0f} s") from error


async def _first_key(store: StoreReader) -> None:
    async for _ in store.list(PROBE_PREFIX):
        return


def _ok(name: str, detail: str, hint: str = "") -> Finding:
    return Finding(name=name, verdict=Verdict.OK, detail=detail, hint=hint)


def _warn(name: str, detail: str, hint: str = "") -> Finding:
    return Finding(name=name, verdict=Verdict.WARN, detail=detail, hint=hint)


def _undetermined(name: str, error: KeepstepError, permission: str) -> Finding:
    denied = error.kind is ErrorKind.ACCESS_DENIED
    hint = f"allow {permission} to know; nothing else needs it" if denied else "look at the rules of the bucket"
    return _warn(name, f"could not be determined: {error}", hint)


def _failed(name: str, error: KeepstepError) -> Finding:
    return Finding(name=name, verdict=Verdict.FAIL, detail=str(error), hint=error.hint)
