"""What a fault proxy does to which requests, and what it notes of each."""

import random
from dataclasses import dataclass, field
from enum import StrEnum


class Fault(StrEnum):
    """What a rule does to a request. `after_bytes` counts bytes of the body."""

    RESET_REQUEST = "reset-request"
    """RST to both sides after some bytes of the request."""
    RESET_RESPONSE = "reset-response"
    """RST to the client after some bytes of the response."""
    END_RESPONSE = "end-response"
    """A clean end of the connection after some bytes of the response."""
    BLACKHOLE = "blackhole"
    """Nothing moves any more after some bytes of the request."""
    LOSE_ANSWER = "lose-answer"
    """The server acts; the client sees a reset."""
    DUPLICATE = "duplicate"
    """The server sees the request twice."""
    FLIP_REQUEST = "flip-request"
    """One bit of the byte at `after_bytes` is wrong."""
    FLIP_RESPONSE = "flip-response"
    DELAY = "delay"
    """`seconds` before the request goes on."""
    STATUS = "status"
    """An answer of ours; the server never sees the request."""
    EARLY_SUCCESS = "early-success"
    """A 200 before the body was read; the server never sees the request."""
    CHECK_CRC64NVME = "check-crc64nvme"
    """As a store that enforces x-amz-checksum-crc64nvme: 400 BadDigest if the body does not match."""
    OBJECT_LOCK = "object-lock"
    """As AWS for a bucket with Object Lock: as above, and 400 InvalidRequest for a body without any checksum."""
    OBJECT_LOCK_MD5 = "object-lock-md5"
    """The same as a store that knows no checksum but Content-MD5, such as Backblaze B2."""


@dataclass(slots=True, kw_only=True)
class Rule:
    """Which requests are hit, how often, and how. `times` below zero: always."""

    name: str
    fault: Fault
    method: str = ""
    target: str = ""
    """A substring of path and query."""
    signed_with: str = ""
    """The access key of the request's signature."""
    times: int = 1
    probability: float = 1.0
    after_bytes: int = 0
    seconds: float = 0.0
    status: int = 503
    body: bytes = b""

    def matches(self, request: "Request", generator: random.Random) -> bool:
        return (
            self.times != 0
            and self.method in ("", request.method)
            and self.target in request.target
            and (not self.signed_with or self.signed_with == request.access_key)
            and (self.probability >= 1 or generator.random() < self.probability)
        )


@dataclass(slots=True, kw_only=True)
class Request:
    """One request as the proxy saw it. `status` is what the client was sent, 0 if nothing.

    `answered_at`: when the server's whole answer had gone to the client, in seconds of time.monotonic; 0 if it had not.
    """

    method: str
    path: str
    query: str
    headers: dict[str, str] = field(repr=False)
    body_bytes: int = 0
    status: int = 0
    answered_at: float = 0.0
    rule: str = ""

    @property
    def access_key(self) -> str:
        """With which it is signed; empty if it is not."""
        return self.headers.get("authorization", "").partition("Credential=")[2].partition("/")[0]

    @property
    def target(self) -> str:
        return f"{self.path}?{self.query}" if self.query else self.path
