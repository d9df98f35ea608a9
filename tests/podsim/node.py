"""A node of a simulated cluster: where pods run, with the images and the objects that they name."""

import copy
import itertools
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.podsim.container import Container, RestartPolicy
from tests.podsim.environment import Objects, environment_of, expand_all
from tests.podsim.identity import identity_of
from tests.podsim.images import Image
from tests.podsim.manifest import containers_of
from tests.podsim.namespaces import NamespaceView, missing_namespaces
from tests.podsim.path_mapping import MappedView
from tests.podsim.pod import Pod
from tests.podsim.timeline import Timeline
from tests.podsim.view import Start, View
from tests.podsim.volumes import Volumes

_BACK_OFF_SECONDS = 0.2
_LONGEST_BACK_OFF_SECONDS = 2.0


class Node:
    """`directory` is its disk; keep it short, for a unix socket may lie in it. `images` by name, `claims` by name.

    `namespaces` false: paths are mapped, as for a user who may make no namespaces. `back_off_seconds` and
    `longest_back_off_seconds` are 10 and 300 on a real node.
    """

    def __init__(
        self,
        directory: Path,
        *,
        images: Mapping[str, Image],
        objects: Objects | None = None,
        claims: Mapping[str, Path] | None = None,
        namespaces: bool | None = None,
        back_off_seconds: float = _BACK_OFF_SECONDS,
        longest_back_off_seconds: float = _LONGEST_BACK_OFF_SECONDS,
    ) -> None:
        self.namespaces = not missing_namespaces() if namespaces is None else namespaces
        self._directory = directory
        self.images = images
        self._objects = objects or Objects()
        self._claims = claims or {}
        self._back_off = (back_off_seconds, longest_back_off_seconds)
        self._pods: list[Pod] = []
        self._numbers = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        problems = []
        for pod in self._pods:
            try:
                pod.__exit__(kind, error, trace)
            except BaseException as problem:
                problems.append(problem)
        if problems:
            raise problems[0]

    def run(self, manifest: Mapping[str, Any]) -> Pod:
        """Take a pod on, as it came out of admission. Raises UnsupportedError, ContainerConfigError."""
        pod = _named(manifest)
        spec = pod["spec"]
        found = list(containers_of(pod))
        directory = self._directory / str(next(self._numbers))
        directory.mkdir(parents=True)
        volumes = Volumes(spec, directory / "v", objects=self._objects, claims=self._claims)
        timeline = Timeline()
        policy = RestartPolicy(spec.get("restartPolicy", "Always"))
        containers = [
            Container(container, role, policy, self._start(pod, container, volumes, directory), timeline)
            for container, role in found
        ]
        made = Pod(
            name=pod["metadata"]["name"],
            containers=containers,
            volumes=volumes,
            make_view=self._view,
            spec=spec,
            timeline=timeline,
            back_off=self._back_off,
        )
        self._pods.append(made)
        return made

    def replace_secret(self, name: str, texts: Mapping[str, str]) -> None:
        """A Secret's owner has replaced what it holds, and kubelet has seen it."""
        self._objects = replace(self._objects, secrets={**self._objects.secrets, name: texts})
        for pod in self._pods:
            if not pod.ended:
                pod.see_objects(self._objects)

    def lose(self) -> None:
        """Power cut: every pod of this node."""
        for pod in self._pods:
            if not pod.ended:
                pod.lose()

    def _view(self) -> View:
        if self.namespaces:
            return NamespaceView()
        return MappedView()

    def _start(self, pod: Mapping[str, Any], container: Mapping[str, Any], volumes: Volumes, directory: Path) -> Start:
        image = self.images[container["image"]]
        environment = environment_of(container, pod, self._objects)
        name = container["name"]
        return Start(
            name=name,
            image=image,
            words=image.words(
                expand_all(container.get("command", ()), environment),
                expand_all(container.get("args", ()), environment),
            ),
            environment=environment,
            working_directory=container.get("workingDir", ""),
            mounts=volumes.mounts(container),
            identity=identity_of(pod["spec"], container, image),
            root=directory / f"{name}.root",
            log=directory / f"{name}.log",
        )


def _named(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """With the name and uid that the API server gives."""
    pod = copy.deepcopy(dict(manifest))
    metadata = pod.setdefault("metadata", {})
    metadata.setdefault("name", metadata.get("generateName", "pod-") + secrets.token_hex(3)[:5])
    metadata.setdefault("uid", str(uuid.uuid4()))
    return pod
