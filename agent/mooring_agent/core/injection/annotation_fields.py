"""Every annotation that Mooring knows, once: docs/annotations.md and the nearest right name are made from this.

The agent's settings are annotations by themselves, but for those that the injection alone can know.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from mooring_agent.core.injection.annotation_values import LEAST_MEMORY
from mooring_agent.core.injection.pod_resources import GUARANTEED_CPU, REQUESTED_CPU
from mooring_agent.core.setting_fields import SettingField, setting_fields
from mooring_api import names
from mooring_api.names import ANNOTATION_PREFIX

_SET_BY_THE_INJECTION: Final = frozenset(
    {
        "volume",
        "checkpoint_directory",
        "socket",
        "state_directory",
        "attempt",
        "node_rank",
        "http_address",
        "store.destination",
        "store.ca_bundle",
        "store.credentials_directory",
        "disk.size_limit_bytes",
        "termination.grace_seconds",
        "cluster.pod_name",
        "cluster.pod_namespace",
        "cluster.pod_uid",
        "cluster.kubernetes_host",
        "cluster.kubernetes_port",
        "cluster.service_account_directory",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotationField:
    """One annotation of the injection's own. `default` is for people."""

    name: str
    default: str
    help: str

    @property
    def key(self) -> str:
        return ANNOTATION_PREFIX + self.name


OWN: Final = (
    AnnotationField(
        name="inject",
        default="`false`",
        help="`true`: restore and agent are added to the pod. Nothing else of this page does anything without it.",
    ),
    AnnotationField(
        name="destination",
        default="must be given",
        help="Where checkpoints go: `s3://bucket/prefix`, or `pvc://claim/path` for a PersistentVolumeClaim of the "
        "pod's namespace, of which only that path is mounted. One run, one destination: all pods and restarts of a "
        "job have the same.",
    ),
    AnnotationField(
        name="credentials",
        default="the pod's workload identity",
        help="Secret with the store's credentials: the data connection of OpenShift AI or Kubeflow "
        "(`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_S3_ENDPOINT`, `AWS_DEFAULT_REGION`, …), or plain keys "
        "(`access-key-id` and `secret-access-key`, `accesskey` and `secretkey`, …). The trainer does not see it.",
    ),
    AnnotationField(
        name="ca-bundle",
        default="the image's",
        help="Certificates of the store's CA, as PEM: `configmap/name/key`, `secret/name/key`, or `name/key` of a "
        "ConfigMap.",
    ),
    AnnotationField(
        name="container",
        default="the only one, else `node`, `trainer` or `pytorch`, else the one that kubectl takes",
        help="Name of the container that trains.",
    ),
    AnnotationField(
        name="checkpoint-directory",
        default=f"`{names.POD_VOLUME_PATH}/{names.CHECKPOINT_DIRECTORY}`",
        help="Where the trainer saves, as an absolute path in its container. If it mounts a volume there or above, "
        "checkpoints stay on that; else an emptyDir is mounted there.",
    ),
    AnnotationField(name="size-limit", default="none", help="`sizeLimit` of the emptyDir for checkpoints, as `500Gi`."),
    AnnotationField(
        name="medium",
        default="`disk`",
        help="`memory` for an emptyDir in memory. It counts against the memory limits of the pod, and restore then has "
        "the trainer's.",
    ),
    AnnotationField(
        name="grace-seconds",
        default="the chart's",
        help="Seconds between the notice of the pod's end and SIGKILL. terminationGracePeriodSeconds is raised to it, "
        "and never lowered.",
    ),
    AnnotationField(
        name="autoload",
        default="`false`",
        help="`true`: the trainer's framework is protected without a change to the program, see "
        "[autoload](autoload.md).",
    ),
    AnnotationField(
        name="temporary-files",
        default="`false`",
        help="`true`: the trainer's TMPDIR is on the checkpoints' volume, and counts against its size. Lightning then "
        "renames its checkpoints, rather than copy them in place.",
    ),
    AnnotationField(
        name="cpu",
        default=f"the chart's; else a request of `{REQUESTED_CPU}` without a limit, and `{GUARANTEED_CPU}` for both in "
        "a Guaranteed pod",
        help="Request and limit of the agent, and of restore. Over TLS the agent uploads at most about 0.85 GB/s for "
        "each CPU of the limit. A BestEffort pod stays one unless this or `memory` is given.",
    ),
    AnnotationField(
        name="memory",
        default="the chart's; none in a BestEffort pod",
        help=f"Request and limit of the agent, and of restore; at least `{LEAST_MEMORY}`.",
    ),
    AnnotationField(
        name="run-as-user",
        default="the trainer's `runAsUser`",
        help="Numeric user of the trainer's image, where the pod does not say it. Another user than the trainer's "
        "must copy checkpoints that it could link, and may not be able to read them.",
    ),
    AnnotationField(
        name="attempt",
        default="a JobSet's uid and restart",
        help="One start of the job, the same on all its pods and never used again: all of them then resume from the "
        "same checkpoint.",
    ),
)
WRITTEN_BY_US: Final = (
    AnnotationField(
        name="injected", default="", help="The version that injected, and a hash of the containers that it added."
    ),
    AnnotationField(name="skipped", default="", help="Why a pod goes without the injection."),
    AnnotationField(
        name="last-committed", default="", help="The newest committed checkpoint, where the agent may say it."
    ),
)


@cache
def settings_annotations() -> Mapping[str, SettingField]:
    """The agent's settings that may be annotations, by key, in the order of docs/settings.md."""
    allowed = (setting for setting in setting_fields() if setting.key not in _SET_BY_THE_INJECTION)
    return {annotation_of(setting): setting for setting in allowed}


def annotation_of(setting: SettingField) -> str:
    return ANNOTATION_PREFIX + setting.name.replace("_", "-")


def known_keys() -> list[str]:
    """All that a user may write."""
    return [*(field.key for field in OWN), *settings_annotations()]
