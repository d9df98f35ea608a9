"""The agent's one error tree: every error has a kind, a hint that says what the user can do, and whether to retry.

Adapters turn third-party exceptions into these, chained with `from`. The core decides by `kind` alone.
"""

import re
from enum import StrEnum
from typing import Final

_USER_OF_A_URL: Final = re.compile(r"(?<=://)[^/?#\s\"'<>]*@")


def without_passwords(text: str) -> str:
    """Return the text without the user and password of each URL in it. An endpoint or a proxy may have them."""
    return _USER_OF_A_URL.sub("", text)


class ErrorKind(StrEnum):
    """What went wrong, in as many cases as callers need to tell apart."""

    # Storage, temporary.
    THROTTLED = "throttled"
    UNREACHABLE = "unreachable"
    TIMED_OUT = "timed-out"
    STORE_FAILED = "store-failed"
    CORRUPTED_IN_TRANSIT = "corrupted-in-transit"
    UPLOAD_LOST = "upload-lost"
    # Storage, needs a person, who may repair it while the agent runs. So the newest checkpoint is tried again.
    ACCESS_DENIED = "access-denied"
    BUCKET_MISSING = "bucket-missing"
    CLOCK_SKEWED = "clock-skewed"
    STORE_FULL = "store-full"
    REQUEST_REFUSED = "request-refused"
    OBJECT_LOCKED = "object-locked"
    # Storage, an answer rather than a fault.
    NOT_FOUND = "not-found"
    ALREADY_EXISTS = "already-exists"
    # What is stored is not what was written.
    CHECKPOINT_CORRUPT = "checkpoint-corrupt"
    NO_CHECKPOINT = "no-checkpoint"
    # The checkpoint may be intact, but does not fit into the memory that this process may use.
    MEMORY_SHORT = "memory-short"
    # The checkpoint may be intact, but a newer version of Keepstep wrote it.
    FORMAT_UNKNOWN = "format-unknown"
    # The snapshot that another one shares objects with was pruned.
    BASE_PRUNED = "base-pruned"
    # The local volume.
    FILE_CHANGED = "file-changed"
    FILE_MISSING = "file-missing"
    DISK_FULL = "disk-full"
    VOLUME_UNUSABLE = "volume-unusable"
    # The caller.
    PATH_OUTSIDE_VOLUME = "path-outside-volume"
    CHECKPOINT_EMPTY = "checkpoint-empty"
    BAD_NAME = "bad-name"
    CONTRADICTION = "contradiction"
    BAD_REQUEST = "bad-request"
    TOO_MANY_CALLS = "too-many-calls"
    BAD_CONFIGURATION = "bad-configuration"
    UNKNOWN_SAVE = "unknown-save"
    CHECKPOINT_FAILED = "checkpoint-failed"
    SHUTTING_DOWN = "shutting-down"


PASSING: Final = frozenset(
    {
        ErrorKind.THROTTLED,
        ErrorKind.UNREACHABLE,
        ErrorKind.TIMED_OUT,
        ErrorKind.STORE_FAILED,
        ErrorKind.CORRUPTED_IN_TRANSIT,
    }
)
"""Temporary kinds, which are retried on behalf of a person who waits at a terminal (restore, `keepstep ls`)."""

_NEEDS_A_PERSON: Final = frozenset(
    {
        ErrorKind.ACCESS_DENIED,
        ErrorKind.BUCKET_MISSING,
        ErrorKind.CLOCK_SKEWED,
        ErrorKind.REQUEST_REFUSED,
        ErrorKind.OBJECT_LOCKED,
        ErrorKind.BAD_CONFIGURATION,
    }
)

REFUSALS: Final = _NEEDS_A_PERSON | {ErrorKind.STORE_FULL, ErrorKind.VOLUME_UNUSABLE}
"""Kinds that come again with every try until somebody changes something at the store or on the volume."""

RETRYABLE: Final = (
    PASSING
    | _NEEDS_A_PERSON
    | {ErrorKind.UPLOAD_LOST, ErrorKind.STORE_FULL, ErrorKind.ALREADY_EXISTS, ErrorKind.VOLUME_UNUSABLE}
)
"""Kinds for which trying again later can help an upload. Somebody may repair a full bucket, a wrong key or an
unreadable file with certificates. An object that already exists and cannot be read back is being removed. A volume that
does not answer may answer later; only a pin that is gone or changed (FILE_MISSING, FILE_CHANGED) is lost."""


class KeepstepError(Exception):
    """An error with a kind and a hint. `str(error)` is one line that names what failed; a traceback adds the hint.

    Neither has the user and password of a URL.
    """

    def __init__(self, kind: ErrorKind, message: str, *, hint: str = "") -> None:
        super().__init__(without_passwords(message))
        self.kind = kind
        self.hint = without_passwords(hint)
        if hint:
            self.add_note(f"hint: {self.hint}")

    @property
    def retryable(self) -> bool:
        """Whether trying the same thing later can help."""
        return self.kind in RETRYABLE


class StoreError(KeepstepError):
    """An object store refused, failed, or gave an answer that cannot be used. Not `sent`: it was asked nothing."""

    def __init__(self, kind: ErrorKind, message: str, *, hint: str = "", sent: bool = True) -> None:
        super().__init__(kind, message, hint=hint)
        self.sent = sent


def checkpoint_corrupt(message: str) -> StoreError:
    """The error for an object of a checkpoint that is not what was written."""
    return StoreError(
        ErrorKind.CHECKPOINT_CORRUPT,
        message,
        hint="restore falls back to the next older checkpoint; `keepstep verify` shows all that is damaged",
    )


def object_too_large(place: object, size_bytes: int, limit_bytes: int) -> StoreError:
    """The error for an object that has more bytes than its reader takes."""
    return StoreError(
        ErrorKind.REQUEST_REFUSED,
        f"{place} has {size_bytes} bytes, more than {limit_bytes}",
        hint="it is not what Keepstep wrote: see who else writes below the destination",
    )


class VolumeError(KeepstepError):
    """The shared volume, or a file on it, is missing, changed, full or otherwise unusable.

    `path`: the file in the checkpoint, where the caller had asked for several.
    """

    path: str = ""


class RequestError(KeepstepError):
    """A caller asked for something that cannot be done. Nothing was changed."""


class PreemptionSourceError(KeepstepError):
    """A cloud's metadata service failed, or gave an answer that cannot be used."""


class ClusterError(KeepstepError):
    """A request to the Kubernetes API could not be made, or failed."""


class EventReceiverError(KeepstepError):
    """A receiver of events did not take one."""


class ConfigurationError(KeepstepError):
    """All that is wrong with the settings, one line per mistake in `problems`."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(
            ErrorKind.BAD_CONFIGURATION, "; ".join(problems), hint="every setting is described in docs/settings.md"
        )
        self.problems = problems


def printable(text: str) -> str:
    """Return `text` with every character that a terminal would obey or hide as its Python escape."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


_FIRST_DELAY_SECONDS: Final = 0.2
_LONGEST_DELAY_SECONDS: Final = 10.0
# A person has to act first, so frequent retries only cost.
_LONGEST_DELAY_WHEN_REFUSED_SECONDS: Final = 30.0
_ATTEMPTS_THAT_STILL_DOUBLE: Final = 12


def retry_delay_seconds(kind: ErrorKind, attempt: int, jitter: float) -> float | None:
    """Return the seconds to wait after failure number `attempt` (from 1); None if trying again cannot help.

    `jitter` in [0, 1) spreads the retries of many parts and pods over the upper half of the delay.
    """
    if kind not in RETRYABLE:
        return None
    longest = _LONGEST_DELAY_WHEN_REFUSED_SECONDS if kind in _NEEDS_A_PERSON else _LONGEST_DELAY_SECONDS
    doubled = _FIRST_DELAY_SECONDS * 2.0 ** min(attempt - 1, _ATTEMPTS_THAT_STILL_DOUBLE)
    return min(longest, doubled) * (0.5 + 0.5 * jitter)
