"""Zero code: what makes a program's framework save and resume with Mooring without a change to the program.

`path()` goes on the program's PYTHONPATH. `path/sitecustomize.py` is all that Python finds there; it loads `zero_code`
(what is hooked) and `post_import` (how) without importing the package `mooring`, whose turn comes with a framework.
"""

from pathlib import Path


def path() -> Path:
    """The folder to put on PYTHONPATH, before everything else that is there."""
    return Path(__file__).parent / "path"
