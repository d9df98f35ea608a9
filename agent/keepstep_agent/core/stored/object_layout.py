"""Where objects lie below a destination's prefix. Keys are relative to it; `<save>` makes each of them unique.

<name>/<save>/<files as the trainer named them>
<name>/<save>/.keepstep/manifest-00008-00008.json  manifest of one agent: its lowest rank, how many ranks it has
<name>/<save>/.keepstep/pack-00003-00000.tar       many small files of one rank; the manifest says which and where
<name>/<save>/.keepstep/base.json                  reservation: the snapshot that this one shares objects with
.keepstep/commits/<n>.<save>.json                  commit marker; n is 999999999999 - step: the newest is listed first
.keepstep/commits/<n>.<save>@<key>.json            the same, of a save that belongs to another output directory
.keepstep/snapshots/<name>/<n>.<save>.json         commit marker of a snapshot; the name is its series, n as above
.keepstep/weights/<n>.<save>[@<key>].json          marker of a save that has lost its optimizer's files; n as above
.keepstep/pruned/<save>/<prune>                    tombstone: a prune is about to delete that snapshot
.keepstep/resume/<attempt>/<generation>.json       the pin: what a start of this attempt resumes from
.keepstep/resume/<attempt>/<generation>.<place>.pod    that pod of the start has it on its disk
.keepstep/damaged/<save>                           what restore found wrong with a save; prune does not rely on it
.keepstep/ledger/<attempt>/<ms>-<nonce>.json       what one agent noted; `none` without an attempt, written at unix ms
.keepstep/lease/run.json                           which `keepstep run` is alive; renewed every few seconds
.keepstep/lease/clock                              written to learn the store's time
.keepstep/draining/<volume>.json                   the pod with that volume ends, and may still commit
"""

import re
from typing import Final

from keepstep_agent.core.errors import ErrorKind, RequestError
from keepstep_agent.core.limits import PATH_LEVELS, STEP
from keepstep_agent.core.model import FileEntry, Kind, Owner, SaveInfo, SnapshotId
from keepstep_api.names import (
    COMMITS_DIRECTORY,
    DAMAGED_DIRECTORY,
    PROBE_DIRECTORY,
    PRUNED_DIRECTORY,
    RESUME_DIRECTORY,
    SNAPSHOTS_DIRECTORY,
    STATE_DIRECTORY,
)

_TOKEN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,127}")
KEY_BYTES: Final = 1024
_NAME_BYTES: Final = 255
"""The longest name of a file or folder on a disk."""
LONGEST_PREFIX_BYTES: Final = 256
"""The longest prefix of a destination, its last slash included. The settings are checked for it."""

_BASE: Final = "base.json"
_MANIFEST: Final = "manifest-"
_PACK: Final = "pack-"
_MANIFEST_NAME: Final = re.compile(r"([0-9]{5,10})-([0-9]{5,10})\.json")
COMMITS_PREFIX: Final = f"{STATE_DIRECTORY}/{COMMITS_DIRECTORY}/"
RESUME_PREFIX: Final = f"{STATE_DIRECTORY}/{RESUME_DIRECTORY}/"
DAMAGED_PREFIX: Final = f"{STATE_DIRECTORY}/{DAMAGED_DIRECTORY}/"
# No token has a ~.
_PASSED_OVER_SUFFIX: Final = "~passed-over"
LEDGER_PREFIX: Final = f"{STATE_DIRECTORY}/ledger/"
"""Of a run's ledger. What reads checkpoints never looks there."""
LEASE_KEY: Final = f"{STATE_DIRECTORY}/lease/run.json"
LEASE_CLOCK_KEY: Final = f"{STATE_DIRECTORY}/lease/clock"
DRAINING_PREFIX: Final = f"{STATE_DIRECTORY}/draining/"
_DRAINING_KEY: Final = re.compile(rf"{re.escape(DRAINING_PREFIX)}({_TOKEN.pattern})\.json")
_LEDGER_KEY: Final = re.compile(rf"{re.escape(LEDGER_PREFIX)}({_TOKEN.pattern})/([0-9]{{13}})-({_TOKEN.pattern})\.json")
_NO_ATTEMPT: Final = "none"
WEIGHTS_PREFIX: Final = f"{STATE_DIRECTORY}/weights/"
_NUMBERED: Final = rf"([0-9]{{12}})\.({_TOKEN.pattern})(?:@([0-9a-f]{{12}}))?\.json"
_WEIGHTS_KEY: Final = re.compile(re.escape(WEIGHTS_PREFIX) + _NUMBERED)
_MARKER_KEY: Final = re.compile(re.escape(COMMITS_PREFIX) + _NUMBERED)
SNAPSHOTS_PREFIX: Final = f"{STATE_DIRECTORY}/{SNAPSHOTS_DIRECTORY}/"
_SNAPSHOT_KEY: Final = re.compile(
    rf"{re.escape(SNAPSHOTS_PREFIX)}({_TOKEN.pattern})/([0-9]{{12}})\.({_TOKEN.pattern})\.json"
)
_PIN_KEY: Final = re.compile(rf"{re.escape(RESUME_PREFIX)}({_TOKEN.pattern})/([0-9]{{6,9}})\.json")
_PLACE_KEY: Final = re.compile(rf"{re.escape(RESUME_PREFIX)}({_TOKEN.pattern})/([0-9]{{6,9}})\.({_TOKEN.pattern})\.pod")
SERIES: Final = "node-"
"""What the name of every series of snapshots begins with. The rank of its node follows."""
PRUNED_PREFIX: Final = f"{STATE_DIRECTORY}/{PRUNED_DIRECTORY}/"
PROBE_PREFIX: Final = f"{STATE_DIRECTORY}/{PROBE_DIRECTORY}/"
UPLOADS_PREFIX: Final = f"{STATE_DIRECTORY}/uploads/"
"""Where a directory as the destination keeps what is not an object yet. Its own listings hide it."""


def check_token(value: str, what: str) -> str:
    """Return `value` if it can be one component of a key (name, save id, attempt); else raise RequestError."""
    if not _TOKEN.fullmatch(value):
        raise _bad_name(
            f"{what} {value!r} cannot be part of an object key",
            "use 1 to 128 letters, digits and . _ = + - and start with a letter or a digit",
        )
    return value


def check_file_path(path: str) -> str:
    """Return `path` (relative, with `/`) if it can be stored as it is; else raise RequestError."""
    try:
        encoded = path.encode()
    except UnicodeEncodeError as error:
        written = path.encode(errors="surrogateescape")
        raise _bad_name(f"file name {written!r} is not UTF-8", "object keys are UTF-8: rename the file") from error
    if any(ord(character) < 0x20 or ord(character) == 0x7F for character in path):
        raise _bad_name(f"file name {path!r} has a control character", "rename the file")
    parts = path.split("/")
    if parts[0] == STATE_DIRECTORY:
        raise _bad_name(f"{path!r} lies in the reserved folder {STATE_DIRECTORY}", "rename the folder")
    if not all(parts) or "." in parts or ".." in parts:
        raise _bad_name(f"{path!r} is not a plain relative path", "use names like a/b.pt")
    if len(parts) > PATH_LEVELS:
        raise _bad_name(f"{path[:60]!r}… has more than {PATH_LEVELS - 1} folders", "use fewer nested folders")
    if len(encoded) > KEY_BYTES - 2 * 128 - 2 - LONGEST_PREFIX_BYTES:
        raise _bad_name(f"{path[:60]!r}… is too long", "shorten the path: S3 keys have 1,024 bytes at most")
    if any(len(part.encode()) > _NAME_BYTES for part in parts):
        raise _bad_name(f"{path[:60]!r}… has a name of more than 255 bytes", "shorten that name")
    return path


def check_directory(path: str) -> str:
    """Return `path` if it can be a directory in the volume that checkpoints were saved in; else raise RequestError.

    Relative to the volume: `.` is the volume itself, and an empty path the checkpoint directory.
    """
    names = path.split("/")
    if names[0] == STATE_DIRECTORY or (path not in {"", "."} and any(name in {"", ".", ".."} for name in names)):
        raise _bad_name(f"{path[:200]!r} is no directory for checkpoints", "use one below the volume")
    if any(ord(character) < 0x20 or ord(character) == 0x7F for character in path):
        raise _bad_name(f"the directory {path[:200]!r} has a control character", "rename the directory")
    return path


def check_link(path: str, target: str) -> str:
    """Return a link's target if it is relative and stays below the first folder of `path`; else raise RequestError.

    A `..` may only come first: after a name, which may be a link itself, nobody knows where it leads.
    """
    names = target.split("/")
    ups = next((position for position, name in enumerate(names) if name != ".."), len(names))
    if target.startswith("/") or ".." in names[ups:] or ups > path.count("/") - 1 or "\0" in target:
        raise _bad_name(f"{path!r} is a link to {target!r}, which leads elsewhere", "use a link inside it")
    return target


def _bad_name(message: str, hint: str) -> RequestError:
    return RequestError(ErrorKind.BAD_NAME, message, hint=hint)


def save_prefix(info: SaveInfo) -> str:
    """Return the prefix of all objects of one save, and of no others."""
    return f"{info.name}/{info.save}/"


def file_key(info: SaveInfo, path: str) -> str:
    return save_prefix(info) + path


def manifests_prefix(info: SaveInfo) -> str:
    """Return the prefix of all manifests of a save, and of no other objects."""
    return f"{save_prefix(info)}{STATE_DIRECTORY}/{_MANIFEST}"


def manifest_key(info: SaveInfo, first_rank: int, rank_count: int) -> str:
    """Return the key of the manifest of `rank_count` ranks, of which `first_rank` is the lowest."""
    return f"{manifests_prefix(info)}{first_rank:05d}-{rank_count:05d}.json"


def parse_manifest_key(info: SaveInfo, key: str) -> tuple[int, int] | None:
    """Return (first rank, rank count) of a manifest of the save; None for any other key."""
    match = _MANIFEST_NAME.fullmatch(key, len(manifests_prefix(info)))
    first_rank, rank_count = (int(match[1]), int(match[2])) if match else (0, 0)
    fits = 0 < rank_count <= info.world_size - first_rank
    return (first_rank, rank_count) if fits and key == manifest_key(info, first_rank, rank_count) else None


def is_manifest(key: str) -> bool:
    """Whether a key may be the one of a manifest of any save."""
    return f"/{STATE_DIRECTORY}/{_MANIFEST}" in key


def file_path(key: str) -> str | None:
    """Return the path of the file with this key, which lies in a save; None for a manifest, a pack or a reservation."""
    path = key.split("/", 2)[2]
    return None if path.startswith(f"{STATE_DIRECTORY}/") else path


def pack_key(info: SaveInfo, rank: int, number: int) -> str:
    return _pack_key(save_prefix(info), rank, number)


def _pack_key(prefix: str, rank: int, number: int) -> str:
    return f"{prefix}{STATE_DIRECTORY}/{_PACK}{rank:05d}-{number:05d}.tar"


def object_key(info: SaveInfo, rank: int, file: FileEntry) -> str:
    """Return the key of the object that holds a file's bytes: its own or a pack, of this save or of the file's owner.

    `file` is no link, and `info` and `rank` are those of the manifest that names it.
    """
    owner = file.owner or Owner(name=info.name, save=info.save, rank=rank, path=file.path)
    prefix = f"{owner.name}/{owner.save}/"
    return _pack_key(prefix, owner.rank, file.place.number) if file.place else prefix + owner.path


def run_of_record(key: str) -> str | None:
    """Return the prefix, below a folder of many runs, of the run whose record (a marker, a pin, …) has this key.

    None for any other key. A save's own manifests, packs and reservation lie in no folder of their own.
    """
    run, record = _at_state_directory(key)
    return run if "/" in record else None


def save_of_record(key: str) -> str | None:
    """Return the prefix, below a folder of many runs, of the save whose manifest, pack or reservation has this key."""
    save, record = _at_state_directory(key)
    is_of_save = record == _BASE or (record.startswith((_MANIFEST, _PACK)) and "/" not in record)
    return save if is_of_save and save.count("/") >= 2 else None


def _at_state_directory(key: str) -> tuple[str, str]:
    """Split a key at the first state directory; the second text is empty if there is none."""
    before, found, record = f"/{key}".partition(f"/{STATE_DIRECTORY}/")
    return f"{before}/"[1:], record if found else ""


def base_key(info: SaveInfo) -> str:
    """Return the key of a snapshot's reservation."""
    return f"{save_prefix(info)}{STATE_DIRECTORY}/{_BASE}"


def reserving_save(key: str) -> str | None:
    """Return the save whose reservation has this key; None for any other key."""
    parts = key.split("/")
    return parts[1] if len(parts) == 4 and parts[2:] == [STATE_DIRECTORY, _BASE] else None


def tombstones_prefix(save: str) -> str:
    """Return the prefix of the tombstones of a snapshot, and of no other's."""
    return f"{PRUNED_PREFIX}{save}/"


def tombstone_key(save: str, prune: str) -> str:
    """Return the key of a tombstone. `prune` is unique to one run of a prune."""
    return tombstones_prefix(save) + prune


def _descending(number: int) -> str:
    """Return twelve digits that put the greatest number first in the order of keys, in which stores list."""
    return f"{STEP - number:012d}"


def step_prefix(step: int) -> str:
    """Return the prefix of the markers of all saves of that step."""
    return f"{COMMITS_PREFIX}{_descending(step)}."


def marker_key(info: SaveInfo) -> str:
    if info.kind is Kind.SNAPSHOT:
        return snapshot_key(SnapshotId(series=info.name, number=info.step, save=info.save))
    return f"{step_prefix(info.step)}{_numbered(info)}"


def _numbered(info: SaveInfo) -> str:
    return f"{info.save}@{info.output_key}.json" if info.output_key else f"{info.save}.json"


def series_prefix(series: str) -> str:
    """Return the prefix of the markers of a series' snapshots, and of no others."""
    return f"{SNAPSHOTS_PREFIX}{series}/"


def snapshot_key(snapshot: SnapshotId) -> str:
    """Return the key of a snapshot's marker."""
    return f"{series_prefix(snapshot.series)}{_descending(snapshot.number)}.{snapshot.save}.json"


def weights_step_prefix(step: int) -> str:
    """Return the prefix of the markers of all saves of that step of which only the weights are left."""
    return f"{WEIGHTS_PREFIX}{_descending(step)}."


def weights_key(info: SaveInfo) -> str:
    """Return the key of the marker that a save has once only its weights are left."""
    return f"{weights_step_prefix(info.step)}{_numbered(info)}"


def parse_weights_key(key: str) -> tuple[int, str, str] | None:
    """As `parse_marker_key`, for the marker of a save of which only the weights are left."""
    match = _WEIGHTS_KEY.fullmatch(key)
    return (STEP - int(match[1]), match[2], match[3] or "") if match else None


def parse_marker_key(key: str) -> tuple[int, str, str] | None:
    """Return (step, save, key of the output directory) of an announced checkpoint's marker; None for any other key."""
    match = _MARKER_KEY.fullmatch(key)
    return (STEP - int(match[1]), match[2], match[3] or "") if match else None


def parse_snapshot_key(key: str) -> SnapshotId | None:
    """Return the snapshot whose marker has this key; None for any other key."""
    match = _SNAPSHOT_KEY.fullmatch(key)
    return SnapshotId(series=match[1], number=STEP - int(match[2]), save=match[3]) if match else None


def pins_prefix(attempt: str) -> str:
    """Return the prefix of all pins and places of an attempt, and of no other's."""
    return f"{RESUME_PREFIX}{attempt}/"


def pin_key(attempt: str, generation: int) -> str:
    return f"{pins_prefix(attempt)}{generation:06d}.json"


def place_key(attempt: str, generation: int, place: str) -> str:
    return f"{pins_prefix(attempt)}{generation:06d}.{place}.pod"


def parse_pin_key(key: str) -> tuple[str, int] | None:
    """Return (attempt, generation) of a pin; None for any other key."""
    match = _PIN_KEY.fullmatch(key)
    return (match[1], int(match[2])) if match else None


def parse_place_key(key: str) -> tuple[str, int, str] | None:
    """Return (attempt, generation, place) of a pod's place; None for any other key."""
    match = _PLACE_KEY.fullmatch(key)
    return (match[1], int(match[2]), match[3]) if match else None


def damage_key(save: str) -> str:
    return f"{DAMAGED_PREFIX}{save}"


def passed_over_key(save: str) -> str:
    return f"{DAMAGED_PREFIX}{save}{_PASSED_OVER_SUFFIX}"


def parse_note_key(key: str) -> tuple[str, bool]:
    """Return of which save an object below DAMAGED_PREFIX is a note, and whether that was passed over."""
    note = key.removeprefix(DAMAGED_PREFIX)
    return note.removesuffix(_PASSED_OVER_SUFFIX), note.endswith(_PASSED_OVER_SUFFIX)


def ledger_key(attempt: str, written_at: float, nonce: str) -> str:
    """Return the key of an object of the ledger. `attempt` may be empty; `nonce` is unique at that moment."""
    return f"{LEDGER_PREFIX}{attempt or _NO_ATTEMPT}/{int(written_at * 1000):013d}-{nonce}.json"


def parse_ledger_key(key: str) -> tuple[str, int] | None:
    """Return (folder of the attempt, unix ms of the writing) of a ledger's object; None for any other key."""
    match = _LEDGER_KEY.fullmatch(key)
    return (match[1], int(match[2])) if match else None


def draining_key(pod: str) -> str:
    """Return the key of the notice of a pod that ends. `pod` is the id of its volume."""
    return f"{DRAINING_PREFIX}{pod}.json"


def parse_draining_key(key: str) -> str | None:
    """Return the pod whose notice has this key; None for any other key."""
    match = _DRAINING_KEY.fullmatch(key)
    return match[1] if match else None
