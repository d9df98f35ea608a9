"""What Python runs at its start when this folder is on PYTHONPATH: hooks for frameworks, then the file that it hides.

Python imports one `sitecustomize`, the first on its path, so this one goes on with the next: a program sees no
difference. Nothing here may break a program that has nothing to do with Mooring, nor cost it anything that one notices:
the package `mooring` itself is imported only once a framework was. Understood by older Pythons too, so that one gets a
warning and no traceback.
"""

import os
import sys
from importlib.machinery import PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  pathlib takes longer than all the rest
_NAME = "sitecustomize"
_PASSED = "_mooring_autoload_passed"
"""Attribute of `sys`: the folders whose `sitecustomize` had its turn, for all of our kind that are on the path."""
TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def _home() -> str:
    """The folder of the package `mooring`: beside this file where a volume carries both, else it holds this file."""
    beside = os.path.join(_HERE, "mooring")  # noqa: PTH118
    return beside if os.path.isdir(beside) else os.path.dirname(os.path.dirname(_HERE))  # noqa: PTH112, PTH120


def _load(name: str, folder: str) -> "ModuleType":
    """A module of the package without the package, whose `__init__` is expensive. Found by later imports too."""
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
    if "mooring.autoload.zero_code" in sys.modules:
        return
    home = _home()
    folder = os.path.join(home, "autoload")  # noqa: PTH118
    _load("mooring.autoload.post_import", folder)
    _load("mooring.autoload.zero_code", folder).begin(os.path.dirname(home))  # noqa: PTH120


def _hidden() -> "ModuleSpec | None":
    """The spec of the `sitecustomize` that Python would have taken without this folder, or None.

    Other tools do as we do, before us or behind us, and some come back to us: nobody is gone on with twice.
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
    """The entry of `sys.path` where it was found, a module or a package."""
    return os.path.dirname(spec.submodule_search_locations[0] if spec.submodule_search_locations else spec.origin or "")  # noqa: PTH120


class _Answer:
    """Answers once what `import sitecustomize` means."""

    def __init__(self, spec: "ModuleSpec") -> None:
        self._spec = spec

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        if name != _NAME:
            return None
        sys.meta_path.remove(self)
        return self._spec


def _chain(spec: "ModuleSpec") -> None:
    """Import it under its name, as Python would: what it raises is Python's to report, and no business of ours."""
    sys.meta_path.insert(0, _Answer(spec))
    sys.modules.pop(_NAME, None)
    __import__(_NAME)


if os.environ.get("MOORING_AUTOLOAD") != "0":
    try:
        _begin()
    except Exception as error:
        if sys.stderr is not None:
            sys.stderr.write("mooring: autoload is off: %s: %s\n" % (type(error).__name__, error))  # noqa: UP031
_spec = _hidden()
if _spec is not None:
    _chain(_spec)
