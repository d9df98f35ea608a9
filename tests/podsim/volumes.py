"""The volumes of one pod: directories of this machine that live as long as Kubernetes lets them.

An emptyDir lives with the pod, whatever becomes of its containers, and is wiped with it; a claim outlives it [web
concepts/storage/volumes]. Secrets and ConfigMaps are written as kubelet writes them, and again when a test says so; a
real kubelet takes up to two minutes [web concepts/configuration/secret]. `medium: Memory` is a directory as well: a
test that needs its size or its speed needs a real node. Nothing is measured, so nothing is evicted for its size; a test
says when.
"""

import os
import shutil
import tempfile
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
        self._volumes = spec.get("volumes", ())
        self._paths: dict[str, Path] = {}
        self._read_only: set[str] = set()
        group = spec.get("securityContext", {}).get("fsGroup")
        for volume in self._volumes:
            self._paths[volume["name"]] = self._make(volume, objects, claims, group)

    def path(self, name: str) -> Path:
        return self._paths[name]

    def mounts(self, container: Mapping[str, Any]) -> list[Mount]:
        """Of one container, the outer before what lies in it."""
        return sorted((self._mount(one) for one in container.get("volumeMounts", ())), key=lambda one: one.target)

    def write_again(self, objects: Objects) -> None:
        """Kubelet has seen that Secrets or ConfigMaps have changed."""
        for volume in self._volumes:
            if volume.keys() & {"secret", "configMap", "projected"}:
                write_atomically(self._paths[volume["name"]], _texts(volume, objects))

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
            case _:
                write_atomically(place, _texts(volume, objects))
        if "emptyDir" not in volume:
            self._read_only.add(volume["name"])
        return place


def _make_directory(place: Path, group: int | None) -> None:
    """For every user, as kubelet makes it [k/k pkg/volume/emptydir/empty_dir.go, perm]; fsGroup makes it a group's."""
    place.mkdir(parents=True)
    if group is not None and os.geteuid() == 0:
        os.chown(place, -1, group)
        place.chmod(_OF_A_GROUP)
    else:
        place.chmod(_EVERYBODYS)


def _texts(volume: Mapping[str, Any], objects: Objects) -> dict[str, str]:
    """The files of a volume that comes from objects."""
    match volume:
        case {"secret": source}:
            return _files("secret", source["secretName"], source, objects)
        case {"configMap": source}:
            return _files("configMap", source["name"], source, objects)
        case {"projected": {"sources": sources}}:
            return {path: text for source in sources for path, text in _projected(source, objects).items()}
        case _:
            raise UnsupportedError(f"the simulator has no volume of {sorted(volume.keys() - {'name'})}")


def _projected(source: Mapping[str, Any], objects: Objects) -> dict[str, str]:
    match source:
        case {"serviceAccountToken": token}:
            return {token["path"]: "a token of the simulator"}
        case {"secret": inner}:
            return _files("secret", inner["name"], inner, objects)
        case {"configMap": inner}:
            return _files("configMap", inner["name"], inner, objects)
        case _:
            raise UnsupportedError(f"the simulator projects no {sorted(source)}")


def _files(kind: str, name: str, source: Mapping[str, Any], objects: Objects) -> dict[str, str]:
    texts = objects.texts(kind, name, optional=source.get("optional", False)) or {}
    items = source.get("items")
    return {one["path"]: texts[one["key"]] for one in items} if items else dict(texts)


def write_atomically(place: Path, texts: Mapping[str, str]) -> None:
    """Replace all files at once: they are links through `..data`, which is swapped.

    [k/k pkg/volume/util/atomic_writer.go]
    """
    place.mkdir(parents=True, exist_ok=True)
    data = place / "..data"
    before = data.resolve() if data.is_symlink() else None
    version = Path(tempfile.mkdtemp(prefix="..2026_", dir=place))
    version.chmod(0o755)
    for path, text in texts.items():
        (version / path).parent.mkdir(parents=True, exist_ok=True)
        (version / path).write_text(text)
    fresh = place / "..data_tmp"
    fresh.symlink_to(version.name)
    fresh.replace(data)
    names = {Path(path).parts[0] for path in texts}
    for name in names:
        if not (place / name).is_symlink():
            (place / name).symlink_to(Path("..data") / name)
    for link in place.iterdir():
        if not link.name.startswith("..") and link.name not in names:
            link.unlink()
    if before is not None:
        shutil.rmtree(before)
