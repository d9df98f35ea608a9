"""torch.distributed.checkpoint without a framework: autoload announces what a loop saves with it.

Protects periodic saves only. Only the program knows its state and how to resume from it, so for just-in-time saves it
must make a keepstep.Checkpointer. SIGTERM keeps the program's handler. A save is announced if all ranks make it from
their main threads, to a path whose name has a number in it. The last number is the step (`step-1200`).
On one node, a save into a folder below the checkpoint directory is left to the agent's snapshots: restore puts these
back where they were, and an announced checkpoint into the checkpoint directory itself, where the program would not find
it. Owns the two functions that it wraps.
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
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from keepstep.autoload.post_import import reason, warn
from keepstep.framework_run import FrameworkRun
from keepstep.integrations import process_group
from keepstep.integrations.ownership import Owner, owns
from keepstep_api import names

_log: Final = logging.getLogger("keepstep")
_PACKAGE: Final = "torch.distributed.checkpoint"
_Save = Callable[..., Any]
_Tell = Callable[[FrameworkRun, Any, Path, int], object]
"""Takes the run, what `save` or `async_save` returned, the path and the step."""


def autoload(module: ModuleType) -> None:
    """Wrap the functions of `torch.distributed.checkpoint.state_dict_saver`; idempotent."""
    if not hasattr(module.save, "__keepstep__"):
        _replace(module, "save", lambda run, metadata, path, step: run.announce_written_when_quiet(path, step, _is_own))
        _replace(module, "async_save", _announce_when_written)
        process_group.announce_before_it_ends()


def _is_own(file: str) -> bool:
    """Whether a file of a checkpoint's folder is one of torch.distributed.checkpoint, and not of the program."""
    return file.endswith((".distcp", ".metadata"))


def _announce_when_written(run: FrameworkRun, answer: Any, path: Path, step: int) -> None:
    # With a stager of the program's own, `async_save` may return two futures.
    run.announce_when(getattr(answer, "upload_completion", answer), path, step)


def _replace(module: ModuleType, name: str, tell: _Tell) -> None:
    original: _Save = getattr(module, name)

    @functools.wraps(original)
    def save(*arguments: Any, **keywords: Any) -> Any:
        answer = original(*arguments, **keywords)
        _tell_safely(tell, answer, arguments, keywords)
        return answer

    save.__keepstep__ = True  # type: ignore[attr-defined]
    setattr(module, name, save)
    package = sys.modules.get(_PACKAGE)
    if getattr(package, name, None) is original:
        setattr(package, name, save)


def _tell_safely(tell: _Tell, answer: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
    # Saves in other threads have another order on each rank. `async_save` itself calls `save` in one.
    if _state.given_up or not owns(Owner.DCP) or threading.current_thread() is not threading.main_thread():
        return
    try:
        path = _path(arguments, keywords)
        if path is None or not _saved_by_all(keywords):
            return
        step = _step(path.name)
        if step is None:
            _say_once(f"a save to {path} is not announced: its name has no number to take for the step")
            return
        run = _run()
        top = run.checkpoint_directory
        if path.parent != top and path.is_relative_to(top) and run.on_one_node:
            return
        tell(run, answer, path, step)
    except Exception as error:
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
    """Keep the program's SIGTERM handler.

    A run takes SIGTERM to save once more. Here nothing would save, and the program would not end when told to.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) != before:
            signal.signal(signal.SIGTERM, before)


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
