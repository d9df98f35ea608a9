"""The exit code of `keepstep run`: what the program said, what the agent has stored, and why the training ended.

The rules are the table in docs/running.md.
"""

from enum import IntEnum
from typing import Final

from keepstep_api.names import JUST_IN_TIME_EXIT_CODE, NOT_DURABLE_EXIT_CODE


class Drained(IntEnum):
    """What an agent says at its exit, as the exit code of its process under `keepstep run`."""

    STORED = 0
    """All that was saved is stored."""
    STOPPED = 3
    """The same, and the trainers left for a termination notice, whoever got it."""
    STOPPED_NOT_STORED = 4
    """They left, and something is not stored."""
    NOT_STORED = NOT_DURABLE_EXIT_CODE
    """Something is not, or a save that was asked for never came."""


_ENDED_BY_ITSELF: Final = frozenset({0, JUST_IN_TIME_EXIT_CODE})


def run_exit_code(*, program_code: int, drained: Drained, noticed: bool, stuck_code: int = 0) -> int:
    """Return the exit code of a run whose program has ended and whose agent has drained.

    Args:
        program_code: As a shell reports it: 128 + n for a program that signal n has killed.
        drained: What the agent said.
        noticed: This run was told that the machine is going away.
        stuck_code: The code of a program that was ended because it was stuck; 0 if it was not.
    """
    if stuck_code:
        return stuck_code
    if drained is Drained.STOPPED:
        # Whatever code a launcher or a wrapper has for it, and whoever was told to stop.
        return JUST_IN_TIME_EXIT_CODE
    if drained is Drained.STOPPED_NOT_STORED:
        return NOT_DURABLE_EXIT_CODE
    if program_code not in _ENDED_BY_ITSELF and not noticed:
        return program_code
    if NOT_DURABLE_EXIT_CODE in (program_code, drained):
        return NOT_DURABLE_EXIT_CODE
    return JUST_IN_TIME_EXIT_CODE if program_code else 0
