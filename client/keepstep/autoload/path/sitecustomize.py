"""Python runs this file at its start if this folder is on PYTHONPATH: it hooks frameworks, then runs the file it hides.

Python imports only the first `sitecustomize` on its path, so this one imports the next, and a program sees no
difference. Nothing here may break a program that has nothing to do with Keepstep, or slow it down noticeably: the
package `keepstep` itself is imported only after a framework is. Older Pythons understand this file too, so that they
print a warning and no traceback. `usercustomize` executes this code too, under its own name.
"""

import os
import sys
from importlib.machinery import PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  pathlib takes longer than all the rest
_NAME = "usercustomize" if __name__ == "usercustomize" else "sitecustomize"
_PASSED = "_keepstep_autoload_passed_" + _NAME
"""Attribute of `sys`: the folders whose file of this name has run, shared by all files like this on the path."""
_BEGUN = "_keepstep_autoload_begun"
"""Attribute of `sys`: autoload has begun or failed to, so no other file like this tries."""
_TABLE = "_keepstep_autoload.zero_code"
"""Not its name in the package: the trainer's `keepstep` may be of another version and have another table."""
TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def _home() -> str:
    """Return the folder of the package `keepstep`: beside this file where a volume has both, else the one around it."""
    beside = os.path.join(_HERE, "keepstep")  # noqa: PTH118
    return beside if os.path.isdir(beside) else os.path.dirname(os.path.dirname(_HERE))  # noqa: PTH112, PTH120


def _load(name: str, folder: str) -> "ModuleType":
    """Import the module that has the last part of this name, without its package, whose `__init__` is expensive."""
    spec = PathFinder.find_spec(name, [folder])
    if spec is None or spec.loader is None:
        raise ImportError("%s is not in %s" % (name, folder))  # noqa: UP031
    module = type(sys)(name)
    module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _begin() -> None:
    home = _home()
    folder = os.path.join(home, "autoload")  # noqa: PTH118
    # The package imports this one too, for the hooks that wait in it.
    _load("keepstep.autoload.post_import", folder)
    _load(_TABLE, folder).begin(os.path.dirname(home))  # noqa: PTH120


def _hidden() -> "ModuleSpec | None":
    """Return the spec of the file of this name that Python would import without this folder, or None.

    Other tools pass on to the next file as this one does, and some come back to this one: none is run twice.
    """
    passed = (*getattr(sys, _PASSED, ()), _HERE)
    entries = sys.path
    after = entries[entries.index(_HERE) + 1 :] if _HERE in entries else entries
    sys.path = [entry for entry in after if entry not in passed]
    try:
        for finder in sys.meta_path:
            spec = finder.find_spec(_NAME, None) if hasattr(finder, "find_spec") else None
            if spec is not None:
                setattr(sys, _PASSED, (*passed, _folder(spec)))
                return spec
        return None
    finally:
        sys.path = entries


def _folder(spec: "ModuleSpec") -> str:
    """Return the entry of `sys.path` where the module or package was found."""
    return os.path.dirname(spec.submodule_search_locations[0] if spec.submodule_search_locations else spec.origin or "")  # noqa: PTH120


class _Answer:
    """Finder that answers one import of `_NAME` with the given spec."""

    def __init__(self, spec: "ModuleSpec") -> None:
        self._spec = spec

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        if name != _NAME:
            return None
        sys.meta_path.remove(self)
        return self._spec


def _chain(spec: "ModuleSpec") -> None:
    """Import the hidden file under its name, as Python would. Python reports what it raises."""
    was_first = _path_of_children()[0] == _HERE
    sys.meta_path.insert(0, _Answer(spec))
    sys.modules.pop(_NAME, None)
    try:
        __import__(_NAME)
    finally:
        # A tool that puts itself first, as OpenTelemetry's does, would hide this file from torchrun's ranks.
        entries = _path_of_children()
        if was_first and entries[0] != _HERE and _HERE in entries:
            os.environ["PYTHONPATH"] = os.pathsep.join([_HERE] + [entry for entry in entries if entry != _HERE])


def _path_of_children() -> "list[str]":
    return os.environ.get("PYTHONPATH", "").split(os.pathsep)


if os.environ.get("KEEPSTEP_AUTOLOAD") != "0" and not hasattr(sys, _BEGUN):
    setattr(sys, _BEGUN, True)
    try:
        _begin()
    except Exception as error:
        if sys.stderr is not None:
            sys.stderr.write("keepstep: autoload is off: %s: %s\n" % (type(error).__name__, error))  # noqa: UP031
_spec = _hidden()
if _spec is not None:
    _chain(_spec)
