"""Which container of a pod trains, and what it says of itself. Owns no change of it."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from mooring_agent.core.injection.findings import Findings
from mooring_agent.core.injection.pod_shape import present
from mooring_api.names import AGENT_CONTAINER, ANNOTATION_PREFIX, RESTORE_CONTAINER

Container = Mapping[str, Any]

OURS: Final = frozenset({RESTORE_CONTAINER, AGENT_CONTAINER})
MESH_PROXIES: Final = frozenset({"istio-proxy", "linkerd-proxy"})
"""What a mesh's webhook, which may run before ours, adds to a pod."""
_DEFAULT_CONTAINER: Final = "kubectl.kubernetes.io/default-container"
_LISTED: Final = 20
USUAL_NAMES: Final = ("node", "trainer", "pytorch")
"""What Kubeflow Trainer and its PyTorchJob call theirs, and what people do."""


def find_trainer(
    metadata: Mapping[str, Any], spec: Mapping[str, Any], wanted: str, findings: Findings
) -> Container | None:
    """The container that trains: the one that is `wanted`, else the only one, else the one with a usual name, else the
    one that kubectl takes. None: `findings` say why."""
    containers = {container.get("name") or "": container for container in others(spec, "containers")}
    if wanted:
        if wanted not in containers:
            findings.problems.append(
                f"{ANNOTATION_PREFIX}container: the pod has no container {wanted}: name one of {_listed(containers)}"
            )
        return containers.get(wanted)
    candidates = [name for name in containers if name not in MESH_PROXIES]
    chosen = present(metadata, "annotations", {}).get(_DEFAULT_CONTAINER)
    for found in (
        candidates,
        [name for name in candidates if name in USUAL_NAMES],
        [name for name in candidates if name == chosen],
    ):
        if len(found) == 1:
            return containers[found[0]]
    findings.problems.append(
        f"which container trains? {_listed(containers)}: name it in the annotation {ANNOTATION_PREFIX}container"
    )
    return None


def _listed(containers: Iterable[str]) -> str:
    return ", ".join([*containers][:_LISTED]) or "none"


def others(spec: Mapping[str, Any], key: str) -> Iterator[Container]:
    """The containers at `key` that are not ours, in their order."""
    return (container for container in present(spec, key, []) if container.get("name") not in OURS)


def variable(container: Container, name: str) -> Mapping[str, Any] | None:
    """The entry of `env` that counts: the last of that name."""
    found = [entry for entry in present(container, "env", []) if entry.get("name") == name]
    return found[-1] if found else None


def value_of(container: Container, name: str) -> str | None:
    """The text of a variable where the pod itself has it; None where there is none, or another object has it."""
    entry = variable(container, name)
    return None if entry is None or entry.get("valueFrom") else present(entry, "value", "")


def mount_above(mounts: Iterable[Mapping[str, Any]], path: str) -> Mapping[str, Any] | None:
    """The mount on which `path` lies: of all at it or above it, the nearest."""
    above = [mount for mount in mounts if is_at_or_below(path, present(mount, "mountPath", ""))]
    return max(above, key=lambda mount: len(plain(mount["mountPath"])), default=None)


def is_at_or_below(path: str, folder: str) -> bool:
    """Both absolute. Nothing counts as below the root: it is the image's."""
    return bool(plain(folder)) and f"{plain(path)}/".startswith(f"{plain(folder)}/")


def plain(path: str) -> str:
    """Without what means nothing in a path, the last slash too; empty for the root."""
    return "".join(f"/{part}" for part in path.split("/") if part not in ("", "."))
