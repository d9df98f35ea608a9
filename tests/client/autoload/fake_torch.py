"""A torch that is imported at once, and a program that imports it, says so and stays until it is told to end."""

from pathlib import Path

from tests.client.autoload.stage import write

_TORCH = """
import mmap, os
with open(os.path.join(os.path.dirname(__file__), "lib", "libtorch_python.so"), "rb") as file:
    LIBRARY = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
"""
_PROGRAM = """
import os, sys, time
os.chdir({folder!r})
sys.path.insert(0, {packages!r})
def wait_for(file):
    while not os.path.exists(file):
        time.sleep(0.02)
def say(file):
    open(file, "w").close()
"""


def write_torch(folder: Path) -> Path:
    """Write the package, whose library is in the memory of every process that has imported it. Returns its folder."""
    write(folder / "torch" / "lib" / "libtorch_python.so", "an ELF file, in earnest")
    write(folder / "torch" / "__init__.py", _TORCH)
    return folder


def write_program(file: Path, body: str) -> Path:
    """Write a program that finds torch also with `python -S`, and may `say` and `wait_for` a file beside it."""
    packages = str(write_torch(file.parent / "packages"))
    return write(file, _PROGRAM.format(folder=str(file.parent), packages=packages) + body)
