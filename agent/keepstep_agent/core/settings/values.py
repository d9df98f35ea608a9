"""Every setting of the agent as frozen values with their defaults. `config.py` reads them once, at the start.

The text beside a field is its help in the CLI and in docs/settings.md.
"""

from dataclasses import dataclass, field
from typing import Annotated, Final

MIB: Final = 1024 * 1024
GIB: Final = 1024 * MIB


class Duration(float):
    """Seconds; written as `90s`, `10m`, `1.5h`, `2d`, or as a plain number of seconds."""


class Share(float):
    """Part of a whole, from 0 to 1; written as `1%` or `0.01`."""


_NO_TIME: Final = Duration(0)
_ONE_PERCENT: Final = Share(0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """How to reach the destination. Credentials are never settings: they come from the AWS chain, or from files."""

    destination: Annotated[str, "Where checkpoints go: s3://bucket/prefix or file:///path."]
    endpoint_url: Annotated[str, "S3 endpoint for stores that are not AWS; empty: AWS, or AWS_ENDPOINT_URL."] = ""
    region: Annotated[str, "S3 region; empty: AWS_DEFAULT_REGION, AWS_REGION or the AWS profile, else us-east-1."] = ""
    addressing: Annotated[
        str, "How the bucket appears in the URL: auto, path or virtual. auto means path with a custom endpoint."
    ] = "auto"
    ca_bundle: Annotated[
        str, "PEM file with the CA that signed the endpoint's certificate; read again when it changes."
    ] = ""
    credentials_directory: Annotated[
        str,
        "Directory with one file per key, as Kubernetes mounts a Secret: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
        "or similar names, and endpoint and region if these are not set; the keys are read again when they change. "
        "Empty: the AWS chain.",
    ] = ""
    aws_files: Annotated[
        bool,
        "Whether to look for credentials and profiles in the home directory (~/.aws), as the AWS CLI does. Files that "
        "AWS_CONFIG_FILE and AWS_SHARED_CREDENTIALS_FILE name are read all the same.",
    ] = True
    verify_tls: Annotated[
        bool,
        "Whether to verify the store's certificate. Without it, anyone on the way can read and change checkpoints.",
    ] = True
    storage_class: Annotated[
        str, "S3 storage class for checkpoint files, e.g. STANDARD_IA; empty: the bucket's default."
    ] = ""
    server_side_encryption: Annotated[str, "AES256 or aws:kms; empty: the bucket's default."] = ""
    kms_key_id: Annotated[str, "Key for aws:kms; empty: the account's default key."] = ""
    tags: Annotated[
        tuple[tuple[str, str], ...],
        "Object tags as key=value, separated by commas; in a flag or a variable %2C is a comma, %3D a =, %25 a %.",
    ] = ()
    requester_pays: Annotated[
        bool, "Pay for the requests to a bucket whose owner does not (x-amz-request-payer: requester)."
    ] = False
    connect_timeout_seconds: Annotated[float, "How long to wait for a connection to the store."] = 10.0
    read_timeout_seconds: Annotated[
        float, "How long a request may wait while the store is silent or slower than 1 KiB/s."
    ] = 60.0
    max_connections: Annotated[int, "Maximum number of connections to the store."] = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings:
    """How files are transferred."""

    part_size_bytes: Annotated[
        int,
        "Size of one part of a multipart upload. The agent uses larger parts if a file would need more than 10,000, "
        "up to four times larger ones for a large checkpoint if the store is fast, and smaller ones, down to 8 MiB, "
        "if it is slow.",
    ] = 32 * MIB
    max_concurrency: Annotated[
        int, "Maximum number of parts transferred at the same time; fewer while a store answers uploads with SlowDown."
    ] = 8
    bandwidth_bytes_per_second: Annotated[int, "Maximum upload rate; 0: none. It does not apply while draining."] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSettings:
    """When the volume counts as nearly full."""

    size_limit_bytes: Annotated[int, "sizeLimit of the emptyDir, which the filesystem does not show; 0: none."] = 0
    eviction_threshold_percent: Annotated[
        float, "Free share of the node's filesystem at which kubelet evicts; applies to disk-backed volumes."
    ] = 10.0
    peak_factor: Annotated[float, "How many times its final size a save needs while it is being written."] = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """How much work a crash may cost, and what that may cost the training. The agent asks for saves in time."""

    recovery_point: Annotated[
        Duration,
        "Oldest that the newest committed checkpoint may get, such as 10m; 0: the agent never asks for saves by "
        "itself.",
    ] = _NO_TIME
    max_overhead: Annotated[
        Share, "Largest share of the training's time that saves may take for it, such as 1%; 0: any share."
    ] = _ONE_PERCENT


def name_patterns(text: str) -> tuple[str, ...]:
    """Return the patterns of a list with commas."""
    return tuple(filter(None, (one.strip() for one in text.split(","))))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSettings:
    """When a trainer that tells its steps counts as stuck."""

    step_timeout: Annotated[
        Duration,
        "After so long without a step, such as 30m, the trainers count as stuck; 0: never. Give more than a save, an "
        "evaluation and the start after a resume take. Trainers that do not tell their steps never count as stuck.",
    ] = _NO_TIME
    stuck_exit_code: Annotated[
        int,
        "keepstep run ends a program that is stuck, with SIGTERM and a grace period later with SIGKILL, and exits with "
        "this code; 0: it only says so.",
    ] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionSettings:
    """Which committed checkpoints stay in the bucket: those that any of these settings keeps.

    The newest valid one, the one committed last, and what a run resumes from always stay.
    """

    keep_last: Annotated[int, "Keep this many newest committed checkpoints; 0: keep all."] = 0
    keep_every_steps: Annotated[
        int, "Also keep milestones: the first checkpoint at or past each multiple of this step; 0: none."
    ] = 0
    keep_every_seconds: Annotated[
        float, "Also keep the last checkpoint of each interval of so many seconds, 3600 for one an hour; 0: none."
    ] = 0.0
    keep_daily: Annotated[
        int,
        "Also keep the last checkpoint of each of so many days (UTC), the newest days on which one was committed; "
        "0: none.",
    ] = 0
    weights_only_after: Annotated[
        Duration,
        "Drop the optimizer's files of kept checkpoints that were committed so long before the newest, such as 7d, "
        "except of the newest --keep-last; restore then never takes them. 0: never.",
    ] = _NO_TIME
    optimizer_files: Annotated[
        str,
        "Names of the files and folders that hold the optimizer's state, with * and ?, separated by commas. They are "
        "dropped only if other files stay.",
    ] = "optimizer*"
    keep_final: Annotated[bool, "Also keep final checkpoints, which a training saves at its end."] = True
    orphan_age_seconds: Annotated[
        float, "Delete saves that never committed, old resume pins and other leftovers once they are older than this."
    ] = 24 * 3600.0

    @property
    def optimizer_patterns(self) -> tuple[str, ...]:
        return name_patterns(self.optimizer_files)

    @property
    def goes_by_time(self) -> bool:
        """Whether when a checkpoint was committed says if it stays, and not only in which order they were."""
        return bool(self.keep_every_seconds or self.keep_daily or self.weights_only_after)


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminationSettings:
    """How the agent ends."""

    grace_seconds: Annotated[
        float, "Seconds between the termination notice and SIGKILL: the pod's terminationGracePeriodSeconds."
    ] = 30.0
    commit_reserve_seconds: Annotated[
        float, "Time reserved for the newest checkpoint's manifests, listing and marker; older uploads may not use it."
    ] = 2.0
    drain_timeout_seconds: Annotated[
        float,
        "How long `keepstep run` waits, after the program has ended, for a store that fails and takes nothing. What a "
        "store refuses is tried for 10 seconds at most.",
    ] = 600.0
    preemption_source: Annotated[
        str,
        "Cloud whose metadata service announces a spot machine's end and maintenance: off, auto, aws, gcp or azure. "
        "On such a notice the trainers save and leave. auto detects the cloud, and does nothing elsewhere.",
    ] = "off"
    preemption_endpoint: Annotated[
        str,
        "URL of the metadata service; empty: AWS_EC2_METADATA_SERVICE_ENDPOINT, GCE_METADATA_HOST, or the clouds' own.",
    ] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSettings:
    """Who is told of each commit, as a CloudEvent and at least once."""

    event_url: Annotated[
        str, "URL that gets each commit by POST. It may hold a secret: give it in the environment. Empty: none."
    ] = ""
    event_command: Annotated[
        str,
        "Program and arguments, run after each commit with the event on its standard input; for a shell's syntax, "
        "sh -c '…'. Empty: none.",
    ] = ""
    event_timeout_seconds: Annotated[
        float, "How long a receiver may take for one event, and how long an exit waits for it after the last commit."
    ] = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """How the agent reports checkpoints to Kubernetes. In an injected pod all but `cluster_events` is known already."""

    cluster_events: Annotated[
        bool,
        "Report to Kubernetes: Events on the pod (saved just in time, lost, storage errors, long restores, stuck "
        "trainers, output that is not stored), and the newest committed checkpoint in its annotation "
        "keepstep.dev/last-committed. The pod's service account needs permission to create events and to patch pods; "
        "the agent skips what is forbidden.",
    ] = False
    priority_boost: Annotated[
        int,
        "How far Kueue takes the job below its own priority just after a commit, when preempting it costs least; it "
        "rises again as uncommitted work grows. Needs cluster_events, and permission to list and patch workloads; 0: "
        "off.",
    ] = 0
    workload_name: Annotated[str, "Name of the job's Workload in Kueue; empty: found by `job_uid`."] = ""
    job_uid: Annotated[str, "Uid of the job that Kueue manages; empty: the pod's."] = ""
    pod_name: Annotated[str, "The pod's name; empty: POD_NAME."] = ""
    pod_namespace: Annotated[str, "The pod's namespace; empty: POD_NAMESPACE, or the service account's."] = ""
    pod_uid: Annotated[str, "The pod's uid; empty: POD_UID. kubectl describe shows Events by it."] = ""
    kubernetes_host: Annotated[str, "The API server; empty: KUBERNETES_SERVICE_HOST."] = ""
    kubernetes_port: Annotated[int, "The API server's port; if not given: KUBERNETES_SERVICE_PORT."] = 443
    service_account_directory: Annotated[str, "Directory with the service account's token, ca.crt and namespace."] = (
        "/var/run/secrets/kubernetes.io/serviceaccount"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of the agent."""

    volume: Annotated[str, "Directory shared with the trainer; every announced path lies below it."]
    checkpoint_directory: Annotated[str, "Where the trainer saves checkpoints and restore puts them; below the volume."]
    socket: Annotated[str, "Unix socket to serve the API on."]
    state_directory: Annotated[
        str,
        "Where the agent and restore keep their state: the journal, what is staged, what was resumed. Nobody else may "
        "write there, so in a pod it is a separate volume that the trainer does not mount. It must live as long as the "
        "volume. By default it lies in the volume, which is enough if trainer and agent trust each other.",
    ] = ""
    store: StoreSettings
    transfer: TransferSettings = field(default_factory=TransferSettings)
    disk: DiskSettings = field(default_factory=DiskSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    progress: ProgressSettings = field(default_factory=ProgressSettings)
    retention: RetentionSettings = field(default_factory=RetentionSettings)
    termination: TerminationSettings = field(default_factory=TerminationSettings)
    events: EventSettings = field(default_factory=EventSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    attempt: Annotated[
        str,
        "Id of the run's job, the same on all its pods. All pods that start together then resume from the same "
        "checkpoint. Empty: no resume pin.",
    ] = ""
    place: Annotated[
        str,
        "Which of the job's pods this is, in one word that its replacement has too. With it, a start is told from the "
        "one before it although both have the same attempt.",
    ] = ""
    node_rank: Annotated[
        int, "Index of this pod in the job. Pod 0 chooses what to resume from if the store has no conditional writes."
    ] = 0
    restore: Annotated[
        str,
        "How a checkpoint gets to the volume. whole: all of it, before the program starts. lazy: while the program "
        "starts and as far as it asks, for programs that resume with Keepstep's client. off: not at all.",
    ] = "whole"
    fall_back_after: Annotated[
        int,
        "After so many starts of `keepstep run` in a row that resumed from the same snapshot, read something of it and "
        "were ended by an error of their own within 60 s, with nothing new to store but logs, restore passes over that "
        "snapshot and takes the one before it. 0: never, and what was passed over is taken again.",
    ] = 3
    watch: Annotated[
        tuple[str, ...],
        "Directories that the program writes to and Keepstep keeps snapshots of, separated by colons; their last names "
        "must differ. The flag may be repeated. Empty: the checkpoint directory; off: none.",
    ] = ()
    http_address: Annotated[
        str,
        "host:port that serves /metrics, /healthz, /readyz, /progressz and, at /, the agent's timeline; without a "
        "host: all addresses; empty: none.",
    ] = ""
    log_format: Annotated[str, "Format of the log: json or console."] = "json"
    nice: Annotated[
        int,
        "CPU niceness of the agent, 0 to 19, added to the niceness that it starts with. It counts if trainer and agent "
        "share a cgroup, as under keepstep run; between a pod's containers CPU requests decide. It also holds in the "
        "drain, because only root can lower it again.",
    ] = 0
    io_priority: Annotated[
        str,
        "Priority of the agent's reads and writes: inherit (by nice), best effort from 0 (first) to 7 (last), or idle. "
        "It counts if the disk's scheduler supports priorities, as BFQ does. It also holds in the drain.",
    ] = "inherit"
