"""Calls that are made when a module was imported, for whoever must not import it for its own sake.

Owns one finder at the front of `sys.meta_path`, there only while something is waited for. It finds nothing by itself:
it asks the other finders and wraps the loader that they name, until the module is executed. Autoload loads it at the
start of every interpreter, before `mooring`: so it imports nothing that Python has not imported by then.
"""

import sys
from _thread import get_ident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    Call = Callable[[ModuleType], object]

_waiting: "dict[str, tuple[tuple[str, Call], ...]]" = {}
"""Module name -> (what the call does it for, the call) of each."""


def after_import(name: str, what: str, call: "Call") -> None:
    """Call it with the module `name` once that is imported: now, if it was.

    What it raises ends here, as one warning that `what` is not protected. A module that fails to import is waited for
    again; one that is reloaded is not.
    """
    _waiting[name] = (*_waiting.get(name, ()), (what, call))
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    if sys.modules.get(name) is not None:
        # Another thread may be in the middle of it; this waits for the end.
        __import__(name)
        _imported(sys.modules[name], name)


def forget_all() -> None:
    """Nothing is waited for any more."""
    _waiting.clear()
    _leave()


def warn(message: str) -> None:
    """One line on stderr, also in a program that configured no logging or has none."""
    if sys.stderr is not None:
        sys.stderr.write(f"mooring: {message}\n")


def reason(error: BaseException) -> str:
    """One line about why something failed."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _imported(module: "ModuleType", name: str) -> None:
    calls = _waiting.pop(name, ())
    if not _waiting:
        _leave()
    for what, call in calls:
        try:
            call(module)
        except Exception as error:
            warn(f"{what} not protected: {reason(error)}")


def _leave() -> None:
    # A new list: another thread that looks for a module may be walking through this one, and would skip a finder.
    sys.meta_path = [finder for finder in sys.meta_path if finder is not _FINDER]


class _Finder:
    """Lets the others find, and has a word with the loader."""

    def __init__(self) -> None:
        self._searches: set[tuple[str, int]] = set()

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        search = (name, get_ident())
        # Another hook like this one asks all finders too, this one among them.
        if name not in _waiting or search in self._searches:
            return None
        self._searches.add(search)
        try:
            spec = self._found_by_others(name, path, target)
        finally:
            self._searches.discard(search)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]  # what importlib needs, and the rest by name
        return spec

    def _found_by_others(
        self, name: str, path: "Sequence[str] | None", target: "ModuleType | None"
    ) -> "ModuleSpec | None":
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None


class _Loader:
    """The real loader, which it puts back before the module can see that there was another."""

    def __init__(self, loader: "Any") -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> "Any":
        return getattr(self.__dict__["_loader"], name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        create = getattr(self._loader, "create_module", None)
        return None if create is None else create(spec)

    def exec_module(self, module: "ModuleType") -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _imported(module, module.__name__)


_FINDER = _Finder()
