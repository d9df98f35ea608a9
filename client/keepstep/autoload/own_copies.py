"""Lets Keepstep import its own gRPC and protobuf where the program's environment has none, if autoload is on.

They lie beside the copy of Keepstep that autoload brings: in `vendor` where a volume has it, else in the site-packages
that it comes from. They are found after everything that the program has, and only while Keepstep imports gRPC. So they
shadow nothing, and a program that looks for a package that it does not have finds no more than before. gRPC is offered
only if its extension module is for this interpreter. protobuf needs none: it runs without its own as well.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Final

# As sitecustomize and `keepstep restore --autoload-to` call them.
_TABLE: Final = "_keepstep_autoload.zero_code"
_VENDOR: Final = "vendor"


@contextmanager
def importable() -> Iterator[None]:
    """While open, `grpc` and `google.protobuf` can be imported from the copies, if there are any that fit."""
    packages: str = getattr(sys.modules.get(_TABLE), "packages_folder", "")
    if not packages:
        yield
        return
    vendor = Path(packages, _VENDOR)
    finder = _Finder(vendor if vendor.is_dir() else Path(packages))
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        # A new list: another thread that looks for a module may be iterating over the old one.
        sys.meta_path = [one for one in sys.meta_path if one is not finder]


class _Finder:
    """Finds what gRPC and protobuf consist of in one folder, and nothing else that lies there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # `google` is a namespace package, of which the program may have other parts.
        if name in ("google", "typing_extensions") or (name == "grpc" and self._grpc_fits()):
            return PathFinder.find_spec(name, [str(self._folder)])
        if name == "google.protobuf":
            return PathFinder.find_spec(name, [str(self._folder / "google")])
        return None

    def _grpc_fits(self) -> bool:
        """Whether the extension module is for this version of Python, this machine and this C library."""
        extension = os.fspath(self._folder / "grpc" / "_cython" / "cygrpc")
        return any(Path(extension + suffix).is_file() for suffix in EXTENSION_SUFFIXES)
