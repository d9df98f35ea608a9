"""The volumes of one pod: directories of this machine that live as long as Kubernetes lets them.

An emptyDir lives with the pod, whatever becomes of its containers, and is wiped with it; a claim outlives it [web
concepts/storage/volumes]. `medium: Memory` is a directory as well: a test that needs its size or its speed needs a real
node. Nothing is measured, so nothing is evicted for its size; a test says when.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.podsim.environment import Objects
from tests.podsim.errors import ContainerConfigError, UnsupportedError

_EVERYBODYS = 0o777
_OF_A_GROUP = 0o2777


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One volumeMount: `source` on this machine is `target` in the container."""

    source: Path
    target: str
    read_only: bool = False


class Volumes:
    """Made when the pod comes to its node, in `directory`. `claims`: the directories behind PersistentVolumeClaims."""

    def __init__(
        self, spec: Mapping[str, Any], directory: Path, *, objects: Objects, claims: Mapping[str, Path]
    ) -> None:
        self._directory = directory
        self._paths: dict[str, Path] = {}
        self._read_only: set[str] = set()
        group = spec.get("securityContext", {}).get("fsGroup")
        for volume in spec.get("volumes", ()):
            self._paths[volume["name"]] = self._make(volume, objects, claims, group)

    def path(self, name: str) -> Path:
        return self._paths[name]

    def mounts(self, container: Mapping[str, Any]) -> list[Mount]:
        """Of one container, the outer before what lies in it."""
        return sorted((self._mount(one) for one in container.get("volumeMounts", ())), key=lambda one: one.target)

    def wipe(self) -> None:
        """The pod is gone from its node, and with it all that is not a claim's."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _mount(self, mount: Mapping[str, Any]) -> Mount:
        if "subPathExpr" in mount:
            raise UnsupportedError("the simulator expands no subPathExpr")
        name = mount["name"]
        source = self._paths[name]
        if mount.get("subPath"):
            source = source / mount["subPath"]
            source.mkdir(parents=True, exist_ok=True)
        read_only = mount.get("readOnly", False) or name in self._read_only
        return Mount(source=source, target=mount["mountPath"].rstrip("/") or "/", read_only=read_only)

    def _make(self, volume: Mapping[str, Any], objects: Objects, claims: Mapping[str, Path], group: int | None) -> Path:
        place: Path = self._directory / volume["name"]
        match volume:
            case {"persistentVolumeClaim": {"claimName": str(claim)}}:
                if claim not in claims:
                    raise ContainerConfigError(f'persistentvolumeclaim "{claim}" not found')
                found: Path = claims[claim]
                return found
            case {"emptyDir": _}:
                _make_directory(place, group)
            case {"secret": source}:
                self._write(place, "secret", source["secretName"], source, objects)
            case {"configMap": source}:
                self._write(place, "configMap", source["name"], source, objects)
            case {"projected": {"sources": sources}}:
                for source in sources:
                    self._project(place, source, objects)
            case _:
                raise UnsupportedError(f"the simulator has no volume of {sorted(volume.keys() - {'name'})}")
        if "emptyDir" not in volume:
            self._read_only.add(volume["name"])
        return place

    def _project(self, place: Path, source: Mapping[str, Any], objects: Objects) -> None:
        match source:
            case {"serviceAccountToken": token}:
                _write_text(place / token["path"], "a token of the simulator")
            case {"secret": inner}:
                self._write(place, "secret", inner["name"], inner, objects)
            case {"configMap": inner}:
                self._write(place, "configMap", inner["name"], inner, objects)
            case _:
                raise UnsupportedError(f"the simulator projects no {sorted(source)}")

    def _write(self, place: Path, kind: str, name: str, source: Mapping[str, Any], objects: Objects) -> None:
        place.mkdir(parents=True, exist_ok=True)
        texts = objects.texts(kind, name, optional=source.get("optional", False)) or {}
        items = source.get("items")
        files = {one["path"]: texts[one["key"]] for one in items} if items else texts
        for path, text in files.items():
            _write_text(place / path, text)


def _make_directory(place: Path, group: int | None) -> None:
    """For every user, as kubelet makes it [k/k pkg/volume/emptydir/empty_dir.go, perm]; fsGroup makes it a group's."""
    place.mkdir(parents=True)
    if group is not None and os.geteuid() == 0:
        os.chown(place, -1, group)
        place.chmod(_OF_A_GROUP)
    else:
        place.chmod(_EVERYBODYS)


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
