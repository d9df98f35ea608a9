"""The table of all annotations that Keepstep knows, and the functions that parse their values.

docs/annotations.md and the suggestions for misspelled names are generated from this table. The agent's settings are
annotations too, except for those that only the injection can know. Parsers take the stripped text and raise ValueError
with what to write instead.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from keepstep_agent.core.errors import KeepstepError
from keepstep_agent.core.injection.pod import SYSTEM_FOLDERS, is_at_or_below, last_name, overlap, parse_quantity, plain
from keepstep_agent.core.injection.pod_resources import GUARANTEED_CPU, REQUESTED_CPU
from keepstep_agent.core.injection.spec import CaBundle, CaSource, Claim
from keepstep_agent.core.injection.volumes import OUR_MOUNTS
from keepstep_agent.core.limits import SECONDS
from keepstep_agent.core.settings.table import SettingField, setting_fields
from keepstep_agent.core.stored.object_layout import check_file_path, check_token
from keepstep_api import names
from keepstep_api.names import ANNOTATION_PREFIX

_OBJECT_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,251}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,251}[a-z0-9])?){0,20}")
_KEY: Final = re.compile(r"[-._a-zA-Z0-9]{1,253}")
LEAST_MEMORY: Final = "128Mi"
"""Measured: with 64Mi an agent does not survive its first upload; 96Mi is enough for restore, and for uploads over TLS
while a hook runs."""
_MOST_USER: Final = 2**31 - 1
_MOST_OUTPUTS: Final = 16
_TAKEN: Final = ("/dev", "/proc", "/sys", *OUR_MOUNTS)


def boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def destination(text: str) -> tuple[str, Claim | None]:
    if re.fullmatch(r"s3://[^/\s]+(/[^/\s]+)*/?", text):
        return text, None
    if text.startswith("pvc://"):
        name, _, path = text.removeprefix("pvc://").partition("/")
        parts = [part for part in path.split("/") if part]
        if ".." in parts or "." in parts or ":" in path:
            raise ValueError(f"{text!r} is not a path in a claim: write it without . and .. and :")
        claim = Claim(name=object_name(name), path="/".join(parts))
        return f"file://{claim.mount_path}", claim
    raise ValueError(f"{text!r} is not a destination: write s3://bucket/prefix or pvc://claim/path")


def object_name(text: str) -> str:
    if len(text) > 253 or not _OBJECT_NAME.fullmatch(text):
        raise ValueError(f"{text!r} is not an object's name: use lower-case letters, digits, - and .")
    return text


def ca_bundle(text: str) -> CaBundle:
    parts = text.split("/")
    if len(parts) == 2:
        parts.insert(0, CaSource.CONFIG_MAP)
    if len(parts) != 3 or parts[0] not in set(CaSource) or not parts[1] or not _KEY.fullmatch(parts[2]):
        raise ValueError(f"{text!r} does not name a bundle: write configmap/name/key, secret/name/key, or name/key")
    return CaBundle(source=CaSource(parts[0]), name=object_name(parts[1]), key=parts[2])


def container(text: str) -> str:
    if not text:
        raise ValueError("the name is empty: name a container of the pod, or leave the annotation out")
    return text


_IN_TRAINER_IMAGE: Final = (*SYSTEM_FOLDERS, "/boot", "/opt", "/var/lib", "/var/run")
"""Folders that the trainer's image may need to start. A volume at or above one of them would hide it."""


def directory(text: str) -> str:
    path = plain(text)
    # Kubernetes would replace a `$(NAME)` in the agent's variables, and not in a mount.
    if not text.startswith("/") or ".." in text.split("/") or ":" in text or "$(" in text:
        raise ValueError(f"{text!r} is not a directory in the trainer: write an absolute path without .., : or $(")
    hidden = next((one for one in _IN_TRAINER_IMAGE if not path or is_at_or_below(one, path)), None)
    if hidden:
        raise ValueError(f"a volume at {text!r} would hide {hidden} of the trainer's image: name a directory below it")
    try:
        # The agent refuses to watch a directory whose name cannot be part of an object's key.
        check_file_path(f"{last_name(path)}/file")
    except KeepstepError as error:
        raise ValueError(f"{error}: {error.hint}") from error
    for taken in _TAKEN:
        if overlap(path, taken):
            raise ValueError(f"{text!r} collides with {taken}: choose another directory")
    return path


def output_directories(text: str) -> tuple[str, ...]:
    if "," in text:
        raise ValueError(f"{text!r} has a comma: separate directories with colons")
    paths = tuple(dict.fromkeys(directory(part.strip()) for part in text.split(":")))
    if len(paths) > _MOST_OUTPUTS:
        raise ValueError(f"{len(paths)} directories are too many: give at most {_MOST_OUTPUTS}")
    of_name: dict[str, str] = {}
    for path in paths:
        name = last_name(path)
        if name in of_name:
            raise ValueError(f"{of_name[name]} and {path} have the same last name: Keepstep tells directories by it")
        of_name[name] = path
        above = next((one for one in paths if one != path and is_at_or_below(path, one)), None)
        if above:
            raise ValueError(f"{path} lies in {above}: give only {above}")
    return paths


def is_watched(text: str) -> bool:
    if text.lower() not in ("true", "false", "off"):
        raise ValueError(f"{text!r} is neither true nor off: name directories in {ANNOTATION_PREFIX}output")
    return text.lower() == "true"


def size(text: str) -> str:
    if parse_quantity(text) < 1:
        raise ValueError(f"{text!r} is less than a byte: write a size such as 500Gi")
    return text


def is_memory(text: str) -> bool:
    if text.lower() not in ("memory", "disk"):
        raise ValueError(f"{text!r} is neither memory nor disk")
    return text.lower() == "memory"


def seconds(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= SECONDS:
        raise ValueError(f"{text!r} is not a number of seconds from 1 to {SECONDS}")
    return int(text)


def amount(text: str) -> str:
    if parse_quantity(text) <= 0:
        raise ValueError(f"{text!r} must be more than 0")
    return text


def memory(text: str) -> str:
    if parse_quantity(text) < parse_quantity(LEAST_MEMORY):
        raise ValueError(f"{text!r} is less than the {LEAST_MEMORY} that the agent needs: write a size such as 256Mi")
    return text


def user(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", text) or int(text) > _MOST_USER:
        raise ValueError(f"{text!r} is not a numeric user id such as 1000")
    return int(text)


def attempt(text: str) -> str:
    try:
        return check_token(text, "attempt")
    except KeepstepError as error:
        raise ValueError(f"{error}: {error.hint}") from error


_SET_BY_THE_INJECTION: Final = frozenset(
    {
        "volume",
        "checkpoint_directory",
        "socket",
        "state_directory",
        "attempt",
        "place",
        "node_rank",
        "watch",
        "http_address",
        "store.destination",
        "store.ca_bundle",
        "store.credentials_directory",
        "store.aws_files",
        "disk.size_limit_bytes",
        "termination.grace_seconds",
        # A pod that ends has a deadline.
        "termination.drain_timeout_seconds",
        # For `keepstep run`: no container of a pod can end the program of another.
        "progress.stuck_exit_code",
        # As above: nobody tells the agent how it ended.
        "fall_back_after",
        # It would run beside the store's credentials.
        "events.event_command",
        "cluster.workload_name",
        "cluster.job_uid",
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
    """One annotation that is not a setting of the agent. `default` is text for the docs page."""

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
        help="`true` adds restore and agent to the pod. Without it, no other annotation of this page has an effect.",
    ),
    AnnotationField(
        name="destination",
        default="must be given",
        help="Where checkpoints go: `s3://bucket/prefix`, or `pvc://claim/path` for a PersistentVolumeClaim of the "
        "pod's namespace, of which only that path is mounted. Each run needs its own; all pods and restarts of a job "
        "share it.",
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
        "checkpoints stay on that volume; otherwise an emptyDir is mounted.",
    ),
    AnnotationField(
        name="output",
        default="none",
        help="Directories that the program writes to, as absolute paths in its container, separated by colons; their "
        "last names must differ. The checkpoints' volume is mounted there, and Keepstep keeps snapshots of them, see "
        "[trainers](trainers.md#programs-that-know-nothing-of-keepstep).",
    ),
    AnnotationField(
        name="watch",
        default="`true`",
        help="`off` keeps no snapshots of the checkpoint directory. Announced checkpoints are stored all the same, and "
        "so are snapshots of `output`.",
    ),
    AnnotationField(
        name="size-limit", default="none", help="`sizeLimit` of the emptyDir for checkpoints, such as `500Gi`."
    ),
    AnnotationField(
        name="medium",
        default="`disk`",
        help="`memory` for an emptyDir in memory. It counts against the pod's memory limits, and restore then gets "
        "the trainer's limit.",
    ),
    AnnotationField(
        name="grace-seconds",
        default="the chart's",
        help="Seconds between the termination notice and SIGKILL. It raises terminationGracePeriodSeconds and never "
        "lowers it.",
    ),
    AnnotationField(
        name="autoload",
        default="`false`",
        help="`true` protects the trainer's framework without a change to the program, see [autoload](autoload.md).",
    ),
    AnnotationField(
        name="asynchronous-saves",
        default="the framework's",
        help="`true`: training waits only for a copy of each checkpoint, with every framework; the copy takes memory "
        "of the trainer's container. `false`: until it is written. "
        "[Each framework has its default](trainers.md#saving-while-training-goes-on).",
    ),
    AnnotationField(
        name="temporary-files",
        default="`false`",
        help="`true` puts the trainer's TMPDIR on the checkpoints' volume, where it counts against the size. Lightning "
        "then renames its checkpoints instead of copying them.",
    ),
    AnnotationField(
        name="cpu",
        default=f"the chart's; else a request of `{REQUESTED_CPU}` without a limit, and `{GUARANTEED_CPU}` for both in "
        "a Guaranteed pod",
        help="CPU request and limit of agent and restore. Over TLS the agent uploads at most about 0.85 GB/s for "
        "each CPU of the limit. A BestEffort pod stays one unless this or `memory` is given.",
    ),
    AnnotationField(
        name="memory",
        default="the chart's; none in a BestEffort pod",
        help=f"Memory request and limit of agent and restore; at least `{LEAST_MEMORY}`.",
    ),
    AnnotationField(
        name="run-as-user",
        default="the trainer's `runAsUser`",
        help="Numeric user of the trainer's image, if the pod does not set it. An agent with another user "
        "than the trainer must copy checkpoints instead of linking them, and may be unable to read them.",
    ),
    AnnotationField(
        name="attempt",
        default="the job's uid, and its restarts as far as it counts them",
        help="Id of the job, the same on all its pods. Those that start together then resume from the same checkpoint.",
    ),
)
WRITTEN_BY_US: Final = (
    AnnotationField(
        name="injected", default="", help="Version of the webhook, and a hash of the containers that it added."
    ),
    AnnotationField(name="skipped", default="", help="Why the pod was not injected."),
    AnnotationField(
        name="last-committed", default="", help="The newest committed checkpoint, if the agent may report it."
    ),
)


@cache
def settings_annotations() -> Mapping[str, SettingField]:
    """Return the agent's settings that may be annotations, by annotation key, in the order of docs/settings.md."""
    allowed = (setting for setting in setting_fields() if setting.key not in _SET_BY_THE_INJECTION)
    return {setting.annotation: setting for setting in allowed}


def known_keys() -> list[str]:
    """Return the keys of all annotations that a user may write."""
    return [*(field.key for field in OWN), *settings_annotations()]
