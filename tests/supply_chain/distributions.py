"""Both distributions as their pyproject.toml describes them, and what they need in turn, as it is installed here."""

import tomllib
from importlib.metadata import requires
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).parents[2]
FOLDERS: Final = {"keepstep": ROOT, "keepstep-agent": ROOT / "agent"}
PROJECTS: Final[dict[str, dict[str, Any]]] = {
    name: tomllib.loads((folder / "pyproject.toml").read_text()) for name, folder in FOLDERS.items()
}
UV: Final = ROOT / ".tools" / "uv" / "bin" / "uv"
"""`make .tools/uv` makes it."""

PROGRAM: Final = """
import keepstep
checkpointer = keepstep.Checkpointer()
print(checkpointer.resume() and checkpointer.resume().name)
with checkpointer.save(7) as directory:
    (directory / "state").write_text("seven")
checkpointer.finish()
"""
"""Saves a checkpoint once, and prints what it resumed."""


def needed(requirements: list[str]) -> set[str]:
    """By these and all that they need in turn, without our own."""
    found: set[str] = set()
    waiting = [Requirement(one) for one in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if name in PROJECTS:
            project = PROJECTS[name]["project"]
            extras = [project["optional-dependencies"][extra] for extra in requirement.extras]
            waiting += [Requirement(one) for several in [project["dependencies"], *extras] for one in several]
        elif name not in found:
            found.add(name)
            waiting += [
                _without_extra(one, extra) for one in requires(name) or [] for extra in requirement.extras | {""}
            ]
    return found


def _without_extra(text: str, extra: str) -> Requirement:
    """A requirement of a package, where its marker holds for this extra; else one that never counts."""
    requirement = Requirement(text)
    holds = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
    return Requirement(requirement.name if holds else f"{requirement.name}; python_version < '3'")


def uv(*words: object) -> list[str]:
    """A command of uv's."""
    return [str(UV), *map(str, words)]
