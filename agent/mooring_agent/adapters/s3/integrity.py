"""How a request says what its bytes must be, so that the store refuses others.

Owns the headers for each integrity of `ports.StoreCapabilities`. A checksum header is signed with all headers: with one
that the store checks, the payload itself need not be. Functions that read the file block.
"""

import base64
import hashlib
from collections.abc import Callable
from typing import Final

from mooring_agent.adapters.checksum import crc32c, crc64nvme, region_crc32c, region_sha256
from mooring_agent.core.model import Region

UNSIGNED_PAYLOAD: Final = "UNSIGNED-PAYLOAD"
CHECKSUM_ALGORITHMS: Final = {"crc64nvme": "CRC64NVME", "crc32c": "CRC32C"}
"""Our name and S3's, the cheapest first."""


def declare_region(integrity: str, region: Region, checksum: int) -> tuple[str, dict[str, str]]:
    """(x-amz-content-sha256, arguments of the request) for a region whose CRC64NVME is `checksum`."""
    return _declare(
        integrity, checksum, crc32c=lambda: region_crc32c(region, checksum), sha256=lambda: region_sha256(region)
    )


def declare_body(integrity: str, body: bytearray, checksum: int) -> tuple[str, dict[str, str]]:
    """As `declare_region`, for bytes in memory."""
    return _declare(integrity, checksum, crc32c=lambda: crc32c(body), sha256=lambda: hashlib.sha256(body).hexdigest())


def _declare(
    integrity: str, checksum: int, *, crc32c: Callable[[], int], sha256: Callable[[], str]
) -> tuple[str, dict[str, str]]:
    match integrity:
        case "crc64nvme":
            return UNSIGNED_PAYLOAD, {"ChecksumCRC64NVME": _encode(checksum, 8)}
        case "crc32c":
            return UNSIGNED_PAYLOAD, {"ChecksumCRC32C": _encode(crc32c(), 4)}
        case "none":
            return UNSIGNED_PAYLOAD, {}
        case _:
            assert integrity == "sha256", integrity
            return sha256(), {}


def declare_upload(integrity: str) -> dict[str, str]:
    """Arguments of CreateMultipartUpload.

    A full-object checksum combines from those of the parts, so that Complete need not repeat them.
    """
    if integrity not in CHECKSUM_ALGORITHMS:
        return {}
    return {"ChecksumAlgorithm": CHECKSUM_ALGORITHMS[integrity], "ChecksumType": "FULL_OBJECT"}


def declare_bytes(integrity: str, body: bytes, *, flip: int = 0) -> dict[str, str]:
    """Arguments for a small body; with `flip` the checksum is wrong in those bits."""
    if integrity == "crc64nvme":
        return {"ChecksumCRC64NVME": _encode(crc64nvme(body) ^ flip, 8)}
    assert integrity == "crc32c", integrity
    return {"ChecksumCRC32C": _encode(crc32c(body) ^ flip, 4)}


def _encode(checksum: int, size_bytes: int) -> str:
    return base64.b64encode(checksum.to_bytes(size_bytes, "big")).decode()
