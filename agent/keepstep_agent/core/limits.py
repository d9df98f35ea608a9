"""Limits for all input from outside, in one table.

Such input comes from gRPC requests, annotations and settings, and from everything that is decoded: markers, manifests,
pins, journal records, and files on the volume, where the trainer can write (client records, staged descriptors, claims,
unannounced checkpoints). A value beyond its limit is refused where it comes in, so that no other code has to count,
keep or compare more than is written here. Decoders enforce the annotated types by themselves.
"""

from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta

from keepstep_api.names import MOST_DONE, MOST_OTHERS, MOST_UNITS

WORLD_SIZE: Final = 100_000
"""Ranks of a job."""
LOCAL_RANKS: Final = 1_024
"""Ranks that share one agent. The core's work for an event may grow with these, but never with the world size."""
STEP: Final = 10**12 - 1
"""A marker's key has twelve digits for the step."""
FILES_PER_RANK: Final = 100_000
PARTS_PER_FILE: Final = 10_000
"""The limit of S3."""
SAVE_BYTES: Final = 2**50
"""All files of one rank. The sum over all ranks of an agent stays within the 64 bits of the API."""
NAME_CHARACTERS: Final = 128
"""A checkpoint's name, a save id, an attempt."""
PATH_BYTES: Final = 4_096
PATH_LEVELS: Final = 64
"""Names in a file's path within a checkpoint. Code that walks the folders has each of them open meanwhile."""
FOLDER_ENTRIES: Final = 250_000
"""Names in one folder. Its listing is in memory, 45 MB at this length."""
LISTED_NAMES_BYTES: Final = 48 * 1024**2
"""The names of one listing, as Python has them: one wide character makes each other one of its name as wide. Also the
paths of one announcement. Enough for `FILES_PER_RANK` names of 255 bytes or paths of 400, without such a character."""
WALKED_ENTRIES: Final = 2_000_000
"""Files and folders that one walk looks at. A tree may grow faster than it is walked."""
TEXT_CHARACTERS: Final = 1_024
"""Free text that is only shown to people."""
SECONDS: Final = 7 * 24 * 3600
"""A grace period."""
UNIX_SECONDS: Final = 253_402_300_799
"""The end of the year 9999, after which no calendar shows a date."""

MARKER_BYTES: Final = 8 * 1024**2
MANIFEST_BYTES: Final = 32 * 1024**2
"""A manifest: enough for a snapshot of `FILES_PER_RANK` files whose paths have 180 characters."""
MANIFESTS_BYTES: Final = 64 * 1024**2
"""All manifests of a save together, if there is enough memory: `core.stored.manifest` says how much."""
PIN_BYTES: Final = 256 * 1024
RECORD_BYTES: Final = 128 * 1024**2
"""A journal record, or the record that restore leaves on the volume."""
DRAINING_BYTES: Final = 4_096
"""The notice of a pod that ends and still saves."""
DRAINING_SECONDS: Final = 3_600
"""How long they hold up a start at most, all together, besides half a minute."""
DRAINING_OBJECTS: Final = 10_000
"""How many of them a start looks at."""
LEDGER_BYTES: Final = 4 * 1024**2
"""One object of a run's ledger. An agent writes a few KiB, a merge up to a quarter of this."""
LEDGER_LIVES: Final = 10_000
LEDGER_ENTRIES: Final = 100_000
LEDGER_OBJECTS: Final = 100_000
LEDGER_OBJECTS_BYTES: Final = 256 * 1024**2
"""How many objects of a run's ledger are read, and of how many bytes together: the newest."""

CLIENT_RECORD_BYTES: Final = 8 * 1024**2
"""A client's record of a checkpoint: enough for `FILES_PER_RANK` files whose paths have 40 characters."""
CLIENT_RECORDS: Final = 64
"""How many client records the agent reads at once: the newest. The newest checkpoint supersedes the others anyway."""
DESCRIPTOR_BYTES: Final = 32 * 1024**2
"""The descriptor beside the pins of a rank: enough for `FILES_PER_RANK` files whose paths have 150 characters."""
ANNOUNCEMENT_CHARACTERS: Final = 8 * 1024**2
"""An announcement in a staged descriptor. As a request it had at most half of that."""
LEAST_ANNOUNCEMENT_CHARACTERS: Final = 64
"""No announcement is shorter. Without this limit a descriptor could hold millions of texts."""
PIN_MARKERS: Final = 1_000
"""How many output directories a start resumes: those that were saved to last."""
CLAIMS_BYTES: Final = 1024**2
"""The file in which a training process lists what it is about to announce."""
OPTIMIZER_PATTERNS: Final = 32
"""How many names of optimizer's files a rule of retention may have."""
OPTIMIZER_PATTERN_CHARACTERS: Final = 100
OWNER_BYTES: Final = 64 * 1024
"""The name of the destination that a volume belongs to."""
TRAINER_STATE_BYTES: Final = 32 * 1024**2
"""A Hugging Face trainer's log of 200,000 lines. It is checked for its end, and not decoded."""
SAFETENSORS_HEADER_BYTES: Final = 100_000_000
"""The format's own limit. The header is searched piece by piece, and not decoded."""

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
WorldSize = Annotated[int, Meta(ge=1, le=WORLD_SIZE)]
Rank = Annotated[int, Meta(ge=0, le=WORLD_SIZE - 1)]
LocalRank = Annotated[int, Meta(ge=0, le=LOCAL_RANKS - 1)]
LocalRanks = Annotated[int, Meta(ge=1, le=LOCAL_RANKS)]
Step = Annotated[int, Meta(ge=0, le=STEP)]
Moment = Annotated[float, Meta(ge=0, le=UNIX_SECONDS)]
FileBytes = Annotated[int, Meta(ge=0, le=SAVE_BYTES)]
Stamp = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""Nanoseconds, as a filesystem gives them."""
PathText = Annotated[str, Meta(max_length=PATH_BYTES)]
FileNames = Annotated[tuple[str, ...], Meta(max_length=FILES_PER_RANK)]
OtherNames = Annotated[tuple[PathText, ...], Meta(max_length=MOST_OTHERS)]
"""Files of the program's own, in an announcement or in a client's record."""
NameText = Annotated[str, Meta(max_length=NAME_CHARACTERS)]

REQUEST_NUMBERS: Final[Mapping[str, int]] = {
    "local_rank": LOCAL_RANKS - 1,
    "rank": WORLD_SIZE - 1,
    "world_size": WORLD_SIZE,
    "local_world_size": LOCAL_RANKS,
    "pid": 2**22,
    "api_version": 2**16,
    "step": STEP,
    "size_bytes": SAVE_BYTES,
    "grace_seconds": SECONDS,
    "trainers_failed_at": UNIX_SECONDS,
    "interval_ms": 3_600_000,
    "wait_ms": 60_000,
    "offset_bytes": SAVE_BYTES,
    "length_bytes": SAVE_BYTES,
    "stall_seconds": SECONDS,
    "done": MOST_DONE,
    "recovery_point_seconds": SECONDS,
    "max_overhead": 1,
}
"""The largest value of each number in the API's requests, by the field's name. The smallest is 0."""

REQUEST_MESSAGES: Final[Mapping[str, int]] = {"ranges": 10_000, "units": MOST_UNITS}
"""How many messages each field of the API's requests may have, by the field's name."""

REQUEST_LISTS: Final[Mapping[str, int]] = {"files": FILES_PER_RANK, "others": MOST_OTHERS}
"""How many texts each field of the API's requests may have, by the field's name."""

REQUEST_TEXTS: Final[Mapping[str, int]] = {
    "client": TEXT_CHARACTERS,
    "attempt": TEXT_CHARACTERS,
    "save": TEXT_CHARACTERS,
    "name": TEXT_CHARACTERS,
    "path": PATH_BYTES,
    "files": PATH_BYTES,
    "others": PATH_BYTES,
    "output": PATH_BYTES,
    "output_key": TEXT_CHARACTERS,
    "unprotected_directory": PATH_BYTES,
    "reason": TEXT_CHARACTERS,
    "source": TEXT_CHARACTERS,
}
"""The longest text of each field, by the field's name. Texts that become part of an object key have further rules."""

SETTING_NUMBERS: Final[Mapping[str, int]] = {
    "node_rank": WORLD_SIZE - 1,
    "max_concurrency": 1_024,
    "max_connections": 1_024,
    "fall_back_after": 1_000,
    "recovery_point": 10 * 366 * 24 * 3600,
    "max_overhead": 1,
    "step_timeout": 10 * 366 * 24 * 3600,
    "stuck_exit_code": 255,
    "keep_last": 10**9,
    "keep_every_steps": STEP,
    "keep_daily": 36_600,
    "weights_only_after": 10 * 366 * 24 * 3600,
    "kubernetes_port": 65_535,
    "priority_boost": 2**31 - 1,
    "eviction_threshold_percent": 100,
    "peak_factor": 1_000,
    "nice": 19,
}
"""The largest value of each setting without a unit, by its name."""

SETTING_UNITS: Final[Mapping[str, int]] = {
    "_seconds": 10 * 366 * 24 * 3600,
    "_bytes": 2**60,
    "_bytes_per_second": 2**60,
}
"""The largest value of the other settings, by the unit that ends their name."""


def largest_setting(name: str) -> int:
    """Return the largest value of a setting that is a number. A KeyError is a bug: every such setting has a limit."""
    if name in SETTING_NUMBERS:
        return SETTING_NUMBERS[name]
    unit = max((unit for unit in SETTING_UNITS if name.endswith(unit)), key=len, default=name)
    return SETTING_UNITS[unit]
