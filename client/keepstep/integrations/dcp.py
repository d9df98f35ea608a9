"""torch.distributed.checkpoint without a framework: autoload has what a loop saves with it in place when it is whole.

Protects periodic saves only. Only the program knows its state and how to resume from it, so for just-in-time saves it
must make a keepstep.Checkpointer. SIGTERM keeps the program's handler. A save is announced if all ranks make it from
their main threads, to a path whose name has a number in it. The last number is the step (`step-1200`).
What `async_save` writes lies in its place at once, as without Keepstep. Owns the two functions that it wraps.
"""

import atexit
import functools
import logging
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from keepstep.autoload.post_import import reason, warn
from keepstep.framework_run import FrameworkRun
from keepstep.gate.sigterm import notice_signals
from keepstep.integrations import process_group
from keepstep.integrations.ownership import Owner, owns
from keepstep_api import names

_log: Final = logging.getLogger("keepstep")
_PACKAGE: Final = "torch.distributed.checkpoint"
_Save = Callable[..., Any]


def autoload(module: ModuleType) -> None:
    """Wrap the functions of `torch.distributed.checkpoint.state_dict_saver`; idempotent."""
    if not hasattr(module.save, "__keepstep__"):
        _replace(module, "save", _save)
        _replace(module, "async_save", _save_behind)
        process_group.announce_before_it_ends()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A call of the program that saves a checkpoint of `step` to `path`."""

    run: FrameworkRun
    path: Path
    step: int
    original: _Save
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    def answer(self, place: Path | None = None) -> Any:
        """Do as the program says, or save to `place`."""
        if place is None or place == self.path:
            return self.original(*self.arguments, **self.keywords)
        answer = self.original(*self.arguments, **{**self.keywords, "checkpoint_id": place})
        if self.writer is not None:
            # It belongs to the program.
            self.writer.reset(self.path)
        return answer

    @property
    def writer(self) -> Any:
        return self.arguments[1] if len(self.arguments) > 1 else self.keywords.get("storage_writer")

    @property
    def goes_elsewhere(self) -> bool:
        """Whether it can save to another path. Of a writer of the program's own nobody knows."""
        own = getattr(sys.modules.get(_PACKAGE), "FileSystemWriter", None)
        return self.writer is None or type(self.writer) is own


def _save(call: _Call) -> Any:
    """Save aside, and move the checkpoint to its place when it is whole: a program takes any folder for one that is."""
    begun, answer = False, None

    def write(place: Path) -> None:
        nonlocal begun, answer
        begun = True
        answer = call.answer(place)

    try:
        elsewhere = call.goes_elsewhere
        call.run.save(call.path, call.step, write, asynchronous=False, elsewhere=elsewhere, program_folder=True)
        call.run.announce()
    except Exception as error:
        if begun:
            raise
        _give_up(error)
        return call.answer()
    return answer


def _save_behind(call: _Call) -> Any:
    answer = call.answer()
    try:
        # With a stager of the program's own, it may return two futures.
        call.run.announce_when(getattr(answer, "upload_completion", answer), call.path, call.step)
    except Exception as error:
        _give_up(error)
    return answer


def _replace(module: ModuleType, name: str, save_protected: Callable[[_Call], Any]) -> None:
    original: _Save = getattr(module, name)

    @functools.wraps(original)
    def save(*arguments: Any, **keywords: Any) -> Any:
        call = _call(original, arguments, keywords)
        return original(*arguments, **keywords) if call is None else save_protected(call)

    save.__keepstep__ = True  # type: ignore[attr-defined]
    setattr(module, name, save)
    package = sys.modules.get(_PACKAGE)
    if getattr(package, name, None) is original:
        setattr(package, name, save)


def _call(original: _Save, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> _Call | None:
    """Return what is to be protected, the same on all ranks; None where the call is left alone."""
    # Saves in other threads have another order on each rank. `async_save` itself calls `save` in one.
    if _state.given_up or not owns(Owner.DCP) or threading.current_thread() is not threading.main_thread():
        return None
    try:
        path = _path(arguments, keywords)
        if path is None or not _saved_by_all(keywords):
            return None
        step = _step(path.name)
        if step is None:
            _say_once(f"a save to {path} is not announced: its name has no number to take for the step")
            return None
        run = _run()
    except Exception as error:
        _give_up(error)
        return None
    return _Call(run=run, path=path, step=step, original=original, arguments=arguments, keywords=keywords)


def _give_up(error: Exception) -> None:
    _state.given_up = True
    warn(f"{_PACKAGE} is not protected: {reason(error)}")


def _path(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Path | None:
    """Return where it saved to; None if that is not a path, or is one that a Checkpointer announces itself."""
    place = keywords.get("checkpoint_id")
    if place is None:
        writer = arguments[1] if len(arguments) > 1 else keywords.get("storage_writer")
        place = getattr(writer, "path", None)
    if place is None or "://" in str(place):
        return None
    path = Path(place).absolute()
    return None if any(part.startswith(names.SAVING_PREFIX) for part in path.parts) else path


def _saved_by_all(keywords: Mapping[str, Any]) -> bool:
    """Whether every rank took part, so that every rank is here now."""
    distributed: Any = sys.modules["torch.distributed"]
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return True
    whole = distributed.get_world_size() == distributed.get_world_size(keywords.get("process_group"))
    if keywords.get("no_dist") or not whole:
        _say_once("a save in which not all ranks take part is not announced")
        return False
    return True


def _step(name: str) -> int | None:
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else None


def _run() -> FrameworkRun:
    with _sigterm_kept():
        run = FrameworkRun.current()
    if not _state.closes_at_exit:
        # At exit, announce what is still being written, and leave no thread inside the store's C++.
        atexit.register(run.close)
        _state.closes_at_exit = True
    return run


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Keep the program's handlers of SIGTERM and of what counts as SIGTERM.

    A run takes them to save once more. Here nothing would save, and the program would not end when told to.
    """
    before = {number: signal.getsignal(number) for number in notice_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)


class _State:
    """What this process has warned of, and whether it has given up."""

    def __init__(self) -> None:
        self.given_up = False
        self.closes_at_exit = False
        self.said: set[str] = set()


_state: Final = _State()


def _say_once(what: str) -> None:
    if what not in _state.said:
        _state.said.add(what)
        _log.warning("%s", what)
