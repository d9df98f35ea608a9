"""The values of an injection: what the cluster's admin decided, what a pod's annotations ask for, and the results.

`core.injection.annotations` reads them, `core.injection.mutation` turns them into a patch, and
`core.injection.admission_review` answers the API server with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from keepstep_agent.core.injection.json_patch import Operation
from keepstep_api.names import ENV_RESTORE, LAZY, POD_DESTINATION_PATH

Pod = Mapping[str, Any]
"""A pod as JSON in an AdmissionReview. Its name may be missing; it then has a generateName."""


class FailurePolicy(StrEnum):
    """What happens to a pod that asks for the injection and cannot have it. The values are Kubernetes' own."""

    FAIL = "Fail"
    IGNORE = "Ignore"


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectionDefaults:
    """What the admin decided for all pods. `annotations` apply if a pod has none of that name."""

    image: str
    image_pull_policy: str = "IfNotPresent"
    openshift: bool = False
    grace_seconds: int = 120
    cpu: str = ""
    """Request and limit; empty: depends on the pod's QoS class, see `pod_resources`."""
    memory: str = "256Mi"
    annotations: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The part of a PersistentVolumeClaim that checkpoints go to. `path` is relative; empty for the whole claim."""

    name: str
    path: str = ""

    @property
    def mount_path(self) -> str:
        """The mount path in agent and restore.

        It differs for each claim and path, because a volume remembers the destination of its checkpoints.
        """
        return "/".join(part for part in (POD_DESTINATION_PATH, self.name, self.path) if part)


class CaSource(StrEnum):
    """The kinds of objects that a CA bundle may come from."""

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
    """Everything that a pod's annotations ask for, checked. An empty string or None means not given.

    `settings` are the agent's, by environment variable, in the order of docs/settings.md. `destination` is the value
    that the agent gets. `cpu`, `memory` and `size_limit` are Kubernetes quantities.
    """

    destination: str
    claim: Claim | None = None
    credentials: str = ""
    ca_bundle: CaBundle | None = None
    container: str = ""
    checkpoint_directory: str = ""
    output: tuple[str, ...] = ()
    """Where the program writes, as absolute paths in the trainer."""
    watch: bool = True
    """Whether the agent keeps snapshots of the checkpoint directory."""
    size_limit: str = ""
    in_memory: bool = False
    grace_seconds: int = 120
    autoload: bool = False
    asynchronous_saves: bool | None = None
    """None: as the framework has it."""
    temporary_files: bool = False
    cpu: str = ""
    memory: str = ""
    run_as_user: int | None = None
    attempt: str = ""
    settings: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def restores_lazily(self) -> bool:
        """Whether the trainer's client asks the agent for what it resumes from."""
        return self.settings.get(ENV_RESTORE) == LAZY


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """The pod does not ask for an injection. `warning`: its author may believe that it does."""

    reason: str
    warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The pod asks for an injection that cannot be made. Each problem says what to do about it."""

    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """What to change in the pod, and what its author should know. With an empty patch the pod is already complete."""

    patch: tuple[Operation, ...]
    warnings: tuple[str, ...] = ()
