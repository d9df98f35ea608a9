"""The client's one error tree: every error has a kind, a hint that says what the user can do, and whether to retry.

Only `VolumeError` and `UsageError` ever reach a training script; an `AgentError` ends as a log line.
"""

from enum import StrEnum
from typing import Final


class ErrorKind(StrEnum):
    """What went wrong, as far as anybody needs to tell cases apart."""

    AGENT_AWAY = "agent-away"
    AGENT_SILENT = "agent-silent"
    AGENT_REFUSED = "agent-refused"
    VOLUME_UNUSABLE = "volume-unusable"
    BAD_ARGUMENT = "bad-argument"
    UNSUPPORTED = "unsupported"


RETRYABLE: Final = frozenset({ErrorKind.AGENT_AWAY, ErrorKind.AGENT_SILENT, ErrorKind.VOLUME_UNUSABLE})
"""Kinds for which trying the same thing later can help."""


class MooringError(Exception):
    """An error with a kind and a hint. `str(error)` is one line that names what failed."""

    def __init__(self, kind: ErrorKind, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.hint = hint

    @property
    def retryable(self) -> bool:
        """Whether trying the same thing later can help."""
        return self.kind in RETRYABLE


class AgentError(MooringError):
    """The agent is away, does not answer, or refused."""


class VolumeError(MooringError):
    """There is no place to save to."""


class UsageError(MooringError):
    """An argument or a way of running that makes no sense here; nothing was changed."""


class StoreLostError(RuntimeError):
    """The store of the process group does not answer."""
