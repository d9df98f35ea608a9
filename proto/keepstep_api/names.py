"""Every environment variable, annotation key, path, port and address that two parts of Keepstep must agree on."""

import os
from pathlib import Path
from typing import Final
from urllib.parse import quote

API_VERSION: Final = 1
"""Revision of `agent.proto`: raised when a peer can tell that something was added. See docs/compatibility.md."""
ERROR_DOMAIN: Final = "keepstep.dev"
STATUS_DETAILS: Final = "grpc-status-details-bin"
"""Trailing metadata of a call that the agent itself ended with an error: a google.rpc.Status."""

# Environment, read by the client and set by the injection or by `keepstep run`.
ENV_VOLUME: Final = "KEEPSTEP_VOLUME"
"""Directory shared by trainer and agent; every checkpoint lies below it."""
ENV_CHECKPOINT_DIRECTORY: Final = "KEEPSTEP_CHECKPOINT_DIRECTORY"
"""Where the trainer writes checkpoints and restore puts them. Default: <volume>/checkpoints."""
ENV_SOCKET: Final = "KEEPSTEP_SOCKET"
"""Unix socket of the agent. Default: <volume>/.keepstep/agent.sock."""
ENV_STATE_DIRECTORY: Final = "KEEPSTEP_STATE_DIRECTORY"
"""Directory that only agent and restore may write: journal, staged descriptors. Default: <volume>/.keepstep/agent."""
ENV_ATTEMPT: Final = "KEEPSTEP_ATTEMPT"
"""Id of one start of the run: unique to that start, the same on all its pods. Used for the resume pin."""
ENV_DESTINATION: Final = "KEEPSTEP_DESTINATION"
"""Where checkpoints go: s3://bucket/prefix or file:///path."""
ENV_RESUME: Final = "KEEPSTEP_RESUME"
"""Path of the checkpoint that restore has put in place; `keepstep run` sets it for the program if there is one."""
ENV_RESTORE: Final = "KEEPSTEP_RESTORE"
"""How a checkpoint gets to the volume: whole, lazy or off. With lazy the client asks the agent for it."""
ENV_ASYNCHRONOUS_SAVES: Final = "KEEPSTEP_ASYNCHRONOUS_SAVES"
"""false: training waits until each checkpoint is written; true: for a copy of it. Default: as the framework has it."""
ENV_AUTOLOAD: Final = "KEEPSTEP_AUTOLOAD"
"""0: autoload leaves this program alone."""
ENV_AUTOLOAD_PROCESSES: Final = "KEEPSTEP_AUTOLOAD_PROCESSES"
"""File to which autoload appends the /proc/self/stat of each process that imports torch; set by `keepstep run`."""
ENV_WATCHED: Final = "KEEPSTEP_WATCHED"
"""Directories in which the agent of the pod stores the program's files, separated by colons."""
ENV_START: Final = "KEEPSTEP_START"
"""Identifies one start of the program: set by `keepstep run`, or `container`, whose start it is then."""
CONTAINER: Final = "container"
OF_THE_TRAINER: Final = (
    ENV_RESUME,
    ENV_ASYNCHRONOUS_SAVES,
    ENV_AUTOLOAD,
    ENV_AUTOLOAD_PROCESSES,
    ENV_WATCHED,
    ENV_START,
)
"""Variables that are no settings of the agent."""
LAZY: Final = "lazy"
OFF: Final = "off"
ENV_GRPC_FORK_HANDLERS: Final = "GRPC_ENABLE_FORK_SUPPORT"
"""gRPC's own variable. 0 in trainers: with its handlers a fork just after a call may hang (`agent_client.channel`)."""

RUN_VOLUME: Final = "keepstep"
"""Default volume of `keepstep run` and `keepstep restore`, below the working directory."""

# Below the volume.
STATE_DIRECTORY: Final = ".keepstep"
"""Keepstep's own folder in the volume; also the reserved folder name in a bucket."""
CHECKPOINT_DIRECTORY: Final = "checkpoints"
SOCKET: Final = "agent.sock"
AGENT_STATE_DIRECTORY: Final = "agent"
"""Default state directory of the agent."""
JOURNAL: Final = "journal.sqlite3"
OWNING_DESTINATION: Final = "destination"
"""Text file with the one destination that everything on this volume belongs to."""
VOLUME_IDENTITY: Final = "volume-id"
"""Text file that tells a volume from all others. The first process of a job with several ranks makes it."""
RESERVE: Final = "reserve"
"""File of reserved space, deleted when the volume is full."""
STAGED_DIRECTORY: Final = "staged"
INCOMING_DIRECTORY: Final = "incoming"
"""Half-restored checkpoints; anything found here at start is garbage."""
AUTOLOAD_PROCESSES: Final = "autoload-processes"
"""The file of ENV_AUTOLOAD_PROCESSES. Each `keepstep run --autoload` begins with an empty one."""
REPLACED_DIRECTORY: Final = "replaced"
"""What had the name of a restored checkpoint, until that is recorded and strange files are back in their places."""
RECORDS_DIRECTORY: Final = "records"
"""One JSON file per local checkpoint that is complete: <name>.json, see `keepstep_api.records`."""
RESUMED: Final = "resumed.json"
"""Record of the checkpoint that the last restore on this volume chose to resume from."""
SAVING_PREFIX: Final = ".saving-"
REMOVING_PREFIX: Final = ".removing-"
TEMPORARY_PREFIXES: Final = (SAVING_PREFIX, REMOVING_PREFIX)
"""Of folders in the checkpoint directory that a Checkpointer fills or removes."""
SAVING_DIRECTORY: Final = "saving"
"""Where a framework writes a checkpoint until it is complete: programs that list their own directories never see it."""
RANKS_DIRECTORY: Final = "ranks"
"""Liveness locks: one file per local rank, held with fcntl.lockf while that process lives."""
SIGNAL_FILE: Final = "signal"
"""Small mapped file through which the agent asks trainers to save, see `keepstep_api.signal_file`."""

RECORD_FORMAT: Final = 1
"""Format version of the records."""

# Below <destination prefix>/.keepstep/
COMMITS_DIRECTORY: Final = "commits"
RESUME_DIRECTORY: Final = "resume"
DAMAGED_DIRECTORY: Final = "damaged"
SNAPSHOTS_DIRECTORY: Final = "snapshots"
PRUNED_DIRECTORY: Final = "pruned"
PROBE_DIRECTORY: Final = "probe"


def annotations_for(directory: str) -> str:
    """Say how a pod is annotated so that the agent sees a directory of the program."""
    return (
        f"annotate the pod with {ANNOTATION_PREFIX}output: {directory}, or with "
        f"{ANNOTATION_PREFIX}checkpoint-directory if a volume of the pod is mounted there"
    )


# Annotations of a pod, and what the injection makes of them. docs/annotations.md says what each means.
ANNOTATION_PREFIX: Final = "keepstep.dev/"
ANNOTATION_INJECT: Final = "keepstep.dev/inject"
ANNOTATION_INJECTED: Final = "keepstep.dev/injected"
"""Written by the webhook: the version that injected, and a hash of what was asked for."""
ANNOTATION_SKIPPED: Final = "keepstep.dev/skipped"
"""Written by the webhook: why a pod that asked for the injection did not get it."""
ANNOTATION_LAST_COMMITTED: Final = "keepstep.dev/last-committed"
"""Written by the agent where it has the right: the newest committed checkpoint."""

RESTORE_CONTAINER: Final = "keepstep-restore"
AGENT_CONTAINER: Final = "keepstep-agent"
CHECKPOINT_VOLUME: Final = "keepstep-checkpoints"
SOCKET_VOLUME: Final = "keepstep-socket"
STATE_VOLUME: Final = "keepstep-state"
DESTINATION_VOLUME: Final = "keepstep-destination"
AUTOLOAD_VOLUME: Final = "keepstep-autoload"
CA_BUNDLE_VOLUME: Final = "keepstep-ca"
CREDENTIALS_VOLUME: Final = "keepstep-credentials"

POD_VOLUME_PATH: Final = "/keepstep"
"""Where the checkpoint volume is mounted in a pod, unless the pod says otherwise."""
POD_SOCKET_DIRECTORY: Final = "/run/keepstep"
POD_STATE_DIRECTORY: Final = "/keepstep-state"
"""Where the agent's own state is mounted, in the agent and in restore only."""
POD_DESTINATION_PATH: Final = "/keepstep-destination"
"""Below it the PersistentVolumeClaim of a pvc:// destination is mounted, in the agent and in restore only."""
POD_AUTOLOAD_PATH: Final = "/keepstep-autoload"
POD_CA_PATH: Final = "/keepstep-ca"
POD_CREDENTIALS_PATH: Final = "/keepstep-credentials"
"""Where the Secret with the store's credentials is mounted, in the agent and in restore only: one file per key."""
POD_METRICS_PORT: Final = 9400

# sun_path is 108 bytes with its terminator.
SOCKET_PATH_LIMIT_BYTES: Final = 107

JUST_IN_TIME_EXIT_CODE: Final = 143
"""128 + SIGTERM: never 0, or a Kubernetes Job would count the index as done."""
NOT_DURABLE_EXIT_CODE: Final = 75
"""EX_TEMPFAIL: the newest checkpoint is not in the bucket, only on the volume."""


def socket_address(socket: Path | str) -> str:
    """Return the address for gRPC, which reads a URI: a `#`, `?` or `%` in the path must be quoted."""
    return f"unix:{quote(os.fsencode(socket))}"


MOST_OTHERS: Final = 1_000
"""How many files of the program's own an announcement may name besides those of the save."""
MOST_UNITS: Final = 16
"""How many sorts of things a program may count in an announcement."""
MOST_DONE: Final = 10**15
"""The largest number of one of them."""
