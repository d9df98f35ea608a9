"""The client's one error tree: every error has a kind, a hint that says what the user can do, and whether to retry.

Only `VolumeError`, `UsageError`, `RanksError` and `RestoreError` ever reach a training script; an `AgentError` ends as
a log line.
"""

from enum import Enum
from functools import partial
from typing import Any, Final


class ErrorKind(str, Enum):
    """What went wrong, for code that must tell cases apart."""

    # As StrEnum, which Python has since 3.11.
    __str__ = str.__str__

    AGENT_UNREACHABLE = "agent-unreachable"
    AGENT_SILENT = "agent-silent"
    AGENT_BUSY = "agent-busy"
    AGENT_REFUSED = "agent-refused"
    CHECKPOINT_DAMAGED = "checkpoint-damaged"
    NOT_RESTORED = "not-restored"
    VOLUME_UNUSABLE = "volume-unusable"
    BAD_ARGUMENT = "bad-argument"
    UNSUPPORTED = "unsupported"
    PICKLE_REFUSED = "pickle-refused"
    RANKS_LATE = "ranks-late"
    STORE_LOST = "store-lost"


RETRYABLE: Final = frozenset(
    {
        ErrorKind.AGENT_UNREACHABLE,
        ErrorKind.AGENT_SILENT,
        ErrorKind.AGENT_BUSY,
        ErrorKind.VOLUME_UNUSABLE,
        ErrorKind.RANKS_LATE,
        ErrorKind.NOT_RESTORED,
    }
)
"""Kinds for which trying the same thing later can help."""


class KeepstepError(Exception):
    """An error with a kind and a hint. `str(error)` is one line that names what failed; a traceback adds the hint."""

    def __init__(self, kind: ErrorKind, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.hint = hint
        if hint:
            # As add_note, which Python has since 3.11; older ones do not show notes.
            self.__notes__ = [f"hint: {hint}"]

    def __reduce__(self) -> tuple[Any, ...]:
        # torch.distributed.checkpoint sends what one rank raised to the others.
        return partial(type(self), self.kind, str(self), hint=self.hint), ()

    @property
    def retryable(self) -> bool:
        """Whether trying the same thing later can help."""
        return self.kind in RETRYABLE


class AgentError(KeepstepError):
    """The agent is unreachable, does not answer, or refused."""


class VolumeError(KeepstepError):
    """There is no place to save to."""


def final_checkpoint_lost(step: int) -> VolumeError:
    """Return the error for the last save of all, which nothing makes up for."""
    return VolumeError(
        ErrorKind.VOLUME_UNUSABLE, f"the final checkpoint of step {step} was lost", hint="a warning above says why"
    )


class UsageError(KeepstepError):
    """An argument or a way of running makes no sense here; nothing was changed."""


class RestoreError(KeepstepError):
    """There may be a checkpoint to resume from, and it cannot be had. Starting from step 0 would lose it."""


class RanksError(KeepstepError):
    """The ranks of the job did not come together in time."""


class StoreLostError(KeepstepError):
    """The store of the process group does not answer. It ends as a log line, or as the cause of a UsageError."""

    def __init__(self, reason: object) -> None:
        super().__init__(ErrorKind.STORE_LOST, str(reason), hint="check whether rank 0, which holds it, has ended")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self),)
