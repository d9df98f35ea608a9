"""Calls functions when the program has imported a module, for code that must not import the module itself.

Owns one finder at the front of `sys.meta_path`, which is there only while a module is waited for. The finder finds
nothing by itself: it asks the other finders and wraps the loader that they return, until the module is executed.
Autoload loads this file at the start of every interpreter, before `keepstep`, so it imports nothing that Python has not
imported by then.
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
"""Module name -> its calls, each with what it protects, as the warning says it."""


def after_import(name: str, what: str, call: "Call") -> None:
    """Pass the module `name` to `call` once it is imported, or at once if it already is.

    What `call` raises ends here, as one warning that `what` is not protected. If the import fails, the next one counts;
    a reload does not.
    """
    _waiting[name] = (*_waiting.get(name, ()), (what, call))
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    if sys.modules.get(name) is not None:
        # Another thread may be in the middle of the import; this waits for its end.
        __import__(name)
        _imported(sys.modules[name], name)


def forget_all() -> None:
    """Cancel all calls that are still waiting."""
    _waiting.clear()
    _leave()


def warn(message: str) -> None:
    """Write one line to stderr, also in a program that configures no logging; nothing if there is no stderr."""
    if sys.stderr is not None:
        sys.stderr.write(f"keepstep: {message}\n")


def reason(error: BaseException) -> str:
    """Return one line about why something failed."""
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
    # A new list: another thread that looks for a module may be iterating over the old one, and would skip a finder.
    sys.meta_path = [finder for finder in sys.meta_path if finder is not _FINDER]


class _Finder:
    """Lets the other finders find the module, and wraps the loader that they return."""

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
    """Wraps the real loader, and puts it back before the module can see the wrapper."""

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
