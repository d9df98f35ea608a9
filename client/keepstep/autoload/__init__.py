"""Autoload: makes a program's framework save and resume with Keepstep without a change to the program.

Put `path()` on the program's PYTHONPATH. Python finds only `path/sitecustomize.py` there. That file loads `zero_code`
(what is hooked) and `post_import` (how) without importing the package `keepstep`, which is imported with a framework.
"""

from pathlib import Path


def path() -> Path:
    """Return the folder to put on PYTHONPATH, before everything else there."""
    return Path(__file__).parent / "path"
