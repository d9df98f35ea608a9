"""Images of the simulated node: how an image's entrypoint, and a program that a pod names, run on this machine."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """`entrypoint` and `command` as in a Dockerfile, with `environment` and the `user` it names.

    `programs`: what a command's first word stands for here. `paths`: what of this machine the image contains besides
    the system's own directories.
    """

    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    programs: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _NOTHING)
    environment: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    user: int = 0
    paths: tuple[Path, ...] = ()

    def words(self, command: Sequence[str], args: Sequence[str]) -> list[str]:
        """What a container runs whose manifest says `command` and `args`; either may be empty.

        A command takes the place of entrypoint and command, args take that of the command alone [web
        tasks/inject-data-application/define-command-argument-container].
        """
        if command:
            return [*command, *args]
        return [*self.entrypoint, *(args or self.command)]

    def here(self, words: Sequence[str]) -> list[str]:
        """The same words as this machine runs them."""
        return [*self.programs.get(words[0], words[:1]), *words[1:]]


def python_image(**changes: Any) -> Image:
    """This Python with everything it can import; `python` and `keepstep` are programs of it."""
    places = {Path(sys.prefix), Path(sys.base_prefix), *(Path(place).absolute() for place in sys.path if place)}
    environment = {"PATH": os.defpath, "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    image = Image(
        entrypoint=("python",),
        programs={"python": (sys.executable,), "keepstep": (sys.executable, "-m", "keepstep_agent")},
        environment=environment,
        paths=tuple(sorted(place for place in places if place.is_dir())),
    )
    return replace(image, **changes)


def keepstep_image(**changes: Any) -> Image:
    """What Dockerfile.agent makes: one image for agent and restore, whose entrypoint is `keepstep`."""
    image = python_image(entrypoint=("keepstep",), user=65532)
    return replace(image, environment={**image.environment, "HOME": "/opt/keepstep/home"}, **changes)
