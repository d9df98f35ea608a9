"""The moments of a save, and what may end a process in each of them."""

import os
import signal
from collections.abc import Callable, Mapping
from enum import StrEnum
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from keepstep.publishing import Publication


class Moment(StrEnum):
    """Where a save is."""

    COPY = "in the middle of the copy"
    BEFORE_FILE = "before a file is written"
    IN_FILE = "in the middle of a file"
    SOME_FILES = "when one file is written"
    BEFORE_NAME = "before the checkpoint has its name"
    COMPLETE = "when the checkpoint is complete, and has no name"
    NAMED = "when the checkpoint has its name"
    RECORDED = "when the checkpoint is recorded"
    ANNOUNCED = "when the checkpoint is announced"


BEHIND: Final = (Moment.COPY, Moment.BEFORE_FILE, Moment.IN_FILE, Moment.SOME_FILES)
"""Those that only a save has that is written behind the training."""


class Way(StrEnum):
    """How a process ends; the value is the signal that it sends to itself."""

    KILL = "SIGKILL"
    NOTICE = "SIGTERM"
    EXCEPTION = "SIGUSR1"
    """`disturbed.py` raises an exception then, wherever the training is."""

    def __call__(self) -> None:
        os.kill(os.getpid(), signal.Signals[self])


class _Place(NamedTuple):
    """The `call`th call of this function within a save, before it does anything or `after` all."""

    owner: str
    name: str
    call: int = 1
    after: bool = False


_STAGED: Final = "checkpoints.staged_save"
_PLACES: Final[Mapping[Moment, _Place]] = MappingProxyType(
    {
        Moment.COPY: _Place("asynchronous_saves.host_copy", "_keep_location", call=3),
        Moment.BEFORE_FILE: _Place("asynchronous_saves.empty_file:EmptyFile", "find"),
        Moment.IN_FILE: _Place("asynchronous_saves.direct_file:DirectFile", "write", call=2),
        Moment.SOME_FILES: _Place("asynchronous_saves.empty_file:EmptyFile", "find", call=2),
        Moment.BEFORE_NAME: _Place(f"{_STAGED}:StagedSave", "put_in_place"),
        Moment.COMPLETE: _Place(_STAGED, "_place"),
        Moment.NAMED: _Place(_STAGED, "write_record"),
        Moment.RECORDED: _Place(f"{_STAGED}:StagedSave", "put_in_place", after=True),
        Moment.ANNOUNCED: _Place("publishing:Publication", "announce", after=True),
    }
)


def at(moment: Moment, then: Callable[[], object]) -> None:
    """Have this process call `then` at a moment of its second save."""
    place = _PLACES[moment]
    module, _, cls = place.owner.partition(":")
    owner = import_module(f"keepstep.{module}")
    owner = getattr(owner, cls) if cls else owner
    function, begin = getattr(owner, place.name), Publication.begin
    saves = calls = 0

    def count_saves(publication: Publication) -> bool:
        nonlocal saves
        # The save before this one is done by now.
        saves += 1
        return begin(publication)

    def count_calls(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += saves == 2
        is_now = saves == 2 and calls == place.call
        if is_now and not place.after:
            then()
        answer = function(*arguments, **keywords)
        if is_now and place.after:
            then()
        return answer

    setattr(owner, place.name, count_calls)
    Publication.begin = count_saves  # type: ignore[assignment,method-assign]
