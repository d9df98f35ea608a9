"""One part of one file, from the store into a descriptor, and only if its bytes are those that were written."""

from typing import Final

from mooring_agent.catalog.reading import StoredFile
from mooring_agent.core.errors import ErrorKind, StoreError
from mooring_agent.core.model import Part
from mooring_agent.ports import ObjectStore

# The second fetch tells a bit flipped on the way from one flipped in the store.
_FETCHES: Final = 2


async def fetch_part(store: ObjectStore, file: StoredFile, part: Part, descriptor: int) -> None:
    """Write the part to its offset in `descriptor`. StoreError(CHECKPOINT_CORRUPT) that names the object otherwise."""
    expected = file.entry.checksums[part.number - 1]
    for _ in range(_FETCHES):
        checksum = await store.get_into(
            file.key,
            offset_bytes=part.offset_bytes,
            size_bytes=part.size_bytes,
            etag=file.etag,
            descriptor=descriptor,
        )
        if checksum == expected:
            return
    raise StoreError(
        ErrorKind.CHECKPOINT_CORRUPT,
        f"{file.key} bytes {part.offset_bytes} to {part.offset_bytes + part.size_bytes} are not what was written: "
        f"checksum {checksum:016x}, the rank manifest says {expected:016x}",
        hint="restore falls back to the next older checkpoint; `mooring verify` shows all that is damaged",
    )
