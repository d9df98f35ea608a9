"""What an injection is made of: what the cluster's admin decided, what a pod's annotations ask for, and the answers.

Owns values only. `core.injection.annotations` reads them, `core.injection.mutation` turns them into a patch,
`core.injection.admission_review` answers the API server with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from mooring_agent.core.injection.json_patch import Operation
from mooring_api.names import POD_DESTINATION_PATH

Pod = Mapping[str, Any]
"""A pod as JSON, as the AdmissionReview has it: a name may be missing, of a generated one there is the beginning."""


class FailurePolicy(StrEnum):
    """What becomes of a pod that asked for the injection and cannot have it. The values are Kubernetes' own."""

    FAIL = "Fail"
    IGNORE = "Ignore"


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectionDefaults:
    """What the admin decided for all pods. `annotations` count where a pod has none of that name."""

    image: str
    image_pull_policy: str = "IfNotPresent"
    openshift: bool = False
    grace_seconds: int = 120
    cpu: str = ""
    """Request and limit; empty: by the pod's class, see `pod_resources`."""
    memory: str = "256Mi"
    annotations: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The part of a PersistentVolumeClaim that checkpoints go to; `path` is relative, and empty for all of it."""

    name: str
    path: str = ""

    @property
    def mount_path(self) -> str:
        """In agent and restore. Another for another claim or path: a volume remembers whose checkpoints it has."""
        return "/".join(part for part in (POD_DESTINATION_PATH, self.name, self.path) if part)


class CaSource(StrEnum):
    """Kinds of objects a CA bundle may come from."""

    CONFIG_MAP = "configmap"
    SECRET = "secret"  # noqa: S105 - the kind of an object


@dataclass(frozen=True, slots=True, kw_only=True)
class CaBundle:
    """PEM certificates in one key of a ConfigMap or a Secret."""

    source: CaSource
    name: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """Everything that a pod's annotations ask for, checked. Empty text and None: nothing was said.

    `settings` are the agent's, by environment variable, in the order of docs/settings.md; `destination` is as the
    agent is told it. `cpu`, `memory` and `size_limit` are Kubernetes' quantities.
    """

    destination: str
    claim: Claim | None = None
    credentials: str = ""
    ca_bundle: CaBundle | None = None
    container: str = ""
    checkpoint_directory: str = ""
    size_limit: str = ""
    in_memory: bool = False
    grace_seconds: int = 120
    autoload: bool = False
    temporary_files: bool = False
    cpu: str = ""
    memory: str = ""
    run_as_user: int | None = None
    attempt: str = ""
    settings: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """The pod does not ask for an injection. `warning`: its author may believe that it does."""

    reason: str
    warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The pod asks for an injection that cannot be made: all that is wrong, each with what to do about it."""

    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """What to change in the pod, and what its author should know. An empty patch: the pod is as it should be."""

    patch: tuple[Operation, ...]
    warnings: tuple[str, ...] = ()
