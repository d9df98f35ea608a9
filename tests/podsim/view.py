"""What a container's processes see of this machine: the port that namespaces and path mapping fill, each as it can."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.podsim.identity import Identity
from tests.podsim.images import Image
from tests.podsim.process import ContainerProcess, Execution
from tests.podsim.volumes import Mount


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """All that a container's first process is started with.

    `words` and `environment` are as the manifest has them, with the container's own paths. `root`: a directory of this
    machine for the view's own use. What the container says goes to `log`.
    """

    name: str
    image: Image
    words: Sequence[str]
    environment: Mapping[str, str]
    working_directory: str
    mounts: Sequence[Mount]
    identity: Identity
    root: Path
    log: Path


class View(Protocol):
    """One pod's view. One thread starts its containers, and lives as long as the pod: with it they would end.

    Each container has a session of its own: who signals his process group reaches nobody outside.
    """

    def start(self, start: Start) -> ContainerProcess:
        """Returns once nothing but the program's own start is left to do. Raises OSError where that fails."""

    def execute(self, start: Start, process: ContainerProcess, words: Sequence[str]) -> Execution:
        """Run a command in a running container, as its user, with its environment."""
