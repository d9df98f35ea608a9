"""Checks the settings' values together, and refuses values that can never work.

Each value is already valid by itself: `read_values` parsed it. All problems are reported at once, at the start. They
name a setting as its reader has written it: as a flag, a variable or an annotation.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from keepstep_agent.core.errors import KeepstepError
from keepstep_agent.core.limits import OPTIMIZER_PATTERN_CHARACTERS, OPTIMIZER_PATTERNS
from keepstep_agent.core.settings.values import GIB, MIB, TerminationSettings, TransferSettings, name_patterns
from keepstep_agent.core.stored.object_layout import LONGEST_PREFIX_BYTES, check_file_path, check_token
from keepstep_api.names import SOCKET_PATH_LIMIT_BYTES

LEAST_RECOVERY_POINT_SECONDS: Final = 1.0
_S3_PART_LEAST_BYTES: Final = 5 * MIB
_S3_PART_MOST_BYTES: Final = 5 * GIB

Named = Callable[[str], str]
"""Returns what the reader calls the setting of a key."""


def setting_problems(values: Mapping[str, Any], named: Named) -> Iterator[str]:
    """Yield every problem. `values` are by key, completed by `with_paths`; paths are absolute."""
    for key, how in (
        ("volume", "--volume or KEEPSTEP_VOLUME"),
        ("store.destination", "--destination or KEEPSTEP_DESTINATION, as s3://bucket/prefix or file:///path"),
    ):
        if not values.get(key):
            yield f"{key} is not set: give {how}"
    destination = values.get("store.destination")
    if destination and not re.match(r"(s3://[^/]|file:///)", destination):
        yield f"{named('store.destination')}: {destination!r} is neither s3://bucket/prefix nor file:///absolute/path"
    endpoint = values.get("store.endpoint_url")
    if endpoint and not is_url(endpoint):
        # Never its value, which may hold a password.
        yield f"{named('store.endpoint_url')} is not a URL such as https://host:port"
    volume, directory = values.get("volume"), values.get("checkpoint_directory")
    if volume and directory and not _is_below(directory, volume):
        yield f"{named('checkpoint_directory')}: {directory} must lie below the volume {volume}"
    yield from _watch_problems(values.get("watch", ()), named("watch"))
    if len(values.get("socket", "").encode()) > SOCKET_PATH_LIMIT_BYTES:
        yield f"socket {values['socket']} is longer than {SOCKET_PATH_LIMIT_BYTES} bytes: give --socket"
    for key in ("transfer.max_concurrency", "store.max_connections"):
        if values.get(key, 1) < 1:
            yield f"{named(key)} must be 1 or more"
    if values.get("store.kms_key_id") and values.get("store.server_side_encryption") != "aws:kms":
        yield f"{named('store.kms_key_id')} needs {named('store.server_side_encryption')} aws:kms"
    for name in ("keep_every_steps", "keep_every_seconds", "keep_daily", "weights_only_after"):
        if values.get(f"retention.{name}") and not values.get("retention.keep_last"):
            keep_last = named("retention.keep_last")
            yield f"{named(f'retention.{name}')} needs {keep_last}: with {keep_last} 0 everything is kept"
    if values.get("fall_back_after", 0) < 0:
        yield f"{named('fall_back_after')} must be 1 or more, or 0 for never"
    yield from _optimizer_file_problems(values.get("retention.optimizer_files", ""), named)
    if 0 < values.get("objective.recovery_point", 0.0) < LEAST_RECOVERY_POINT_SECONDS:
        yield f"{named('objective.recovery_point')} must be {LEAST_RECOVERY_POINT_SECONDS:g} s or more, or 0 for none"
    if values.get("progress.stuck_exit_code") and not values.get("progress.step_timeout"):
        step_timeout = named("progress.step_timeout")
        yield f"{named('progress.stuck_exit_code')} needs {step_timeout}: without it, nothing counts as stuck"
    if values.get("cluster.priority_boost") and not values.get("cluster.cluster_events"):
        yield f"{named('cluster.priority_boost')} needs {named('cluster.cluster_events')}"
    yield from _receiver_problems(values, named)
    yield from _impossible_sizes(values, named)
    if values.get("attempt"):
        try:
            check_token(values["attempt"], "attempt")
        except KeepstepError as error:
            yield f"{named('attempt')}: {error}: {error.hint}"
    address = values.get("http_address")
    if address and not _is_address(address):
        yield f"{named('http_address')}: {address!r} is not host:port with a port from 1 to 65535, as 0.0.0.0:9090"


def _optimizer_file_problems(text: str, named: Named) -> Iterator[str]:
    """Yield a problem for patterns that match no name, and for more than a marker may hold."""
    patterns, optimizer_files = name_patterns(text), named("retention.optimizer_files")
    if text and not patterns:
        yield (
            f"{optimizer_files} is empty: give names such as optimizer*, or set "
            f"{named('retention.weights_only_after')} to 0"
        )
    if len(patterns) > OPTIMIZER_PATTERNS or any(len(one) > OPTIMIZER_PATTERN_CHARACTERS for one in patterns):
        yield (
            f"{optimizer_files} has more than {OPTIMIZER_PATTERNS} names, or one of more than "
            f"{OPTIMIZER_PATTERN_CHARACTERS} characters"
        )
    if slashed := next((one for one in patterns if "/" in one), ""):
        yield f"{optimizer_files} has {slashed!r}: give names of files or folders, without a slash"


def _receiver_problems(values: Mapping[str, Any], named: Named) -> Iterator[str]:
    """Yield a problem for each receiver of events that cannot work. Never its value: a URL may hold a secret."""
    url, command = values.get("events.event_url"), values.get("events.event_command", "")
    if url and not is_url(url):
        yield f"{named('events.event_url')} is not a URL such as https://host/path"
    try:
        if command and not shlex.split(command):
            yield f"{named('events.event_command')} has no program: give a program and its arguments"
    except ValueError as error:
        yield f"{named('events.event_command')} cannot be split into a program and its arguments: {error}"
    if values.get("events.event_timeout_seconds", 1.0) == 0:
        yield f"{named('events.event_timeout_seconds')} must be more than 0"


def _watch_problems(directories: Sequence[str], watch: str) -> Iterator[str]:
    """Yield a problem for each watched directory whose files could not be told from another's."""
    for directory in directories:
        name = directory.rpartition("/")[2]
        try:
            check_file_path(f"{name}/file")
        except KeepstepError as error:
            yield f"{watch}: {directory}: {error}"
        for other in directories:
            if other < directory and other.rpartition("/")[2] == name:
                yield f"{watch}: {other} and {directory} have the same last name: snapshots tell directories by it"
            if other != directory and _is_below(directory, other):
                yield f"{watch}: {directory} lies below {other}: give only {other}"


def _impossible_sizes(values: Mapping[str, Any], named: Named) -> Iterator[str]:
    """Yield a problem for each number or length that can never work."""
    destination = values.get("store.destination", "")
    to_s3 = destination.startswith("s3://")
    prefix_bytes = len(destination.removeprefix("s3://").partition("/")[2].strip("/").encode())
    if to_s3 and prefix_bytes >= LONGEST_PREFIX_BYTES:
        yield (
            f"{named('store.destination')}: the prefix in {destination[:60]!r}… has {prefix_bytes} bytes: give one of "
            f"less than {LONGEST_PREFIX_BYTES}, for a checkpoint's files need the rest of the 1,024 that S3 allows "
            "a key"
        )
    part_size_bytes = values.get("transfer.part_size_bytes", TransferSettings().part_size_bytes)
    part_size = named("transfer.part_size_bytes")
    if to_s3 and part_size_bytes < _S3_PART_LEAST_BYTES:
        yield f"{part_size}: {part_size_bytes} is less than S3's minimum: give 5MiB or more"
    elif to_s3 and part_size_bytes > _S3_PART_MOST_BYTES:
        yield f"{part_size}: {part_size_bytes} is more than S3's maximum: give 5GiB or less"
    elif part_size_bytes < 1:
        yield f"{part_size} must be 1 or more"
    if values.get("disk.eviction_threshold_percent", 0.0) >= 100:
        yield f"{named('disk.eviction_threshold_percent')} must be less than 100"
    if values.get("disk.peak_factor", 1.0) < 1:
        yield f"{named('disk.peak_factor')} must be 1 or more: a save needs at least its final size"
    for key in ("store.connect_timeout_seconds", "store.read_timeout_seconds"):
        if values.get(key, 1.0) == 0:
            yield f"{named(key)} must be more than 0"
    defaults = TerminationSettings()
    grace_seconds = values.get("termination.grace_seconds", defaults.grace_seconds)
    reserve_seconds = values.get("termination.commit_reserve_seconds", defaults.commit_reserve_seconds)
    if reserve_seconds >= grace_seconds:
        grace = named("termination.grace_seconds")
        yield (
            f"{named('termination.commit_reserve_seconds')} {reserve_seconds:g} leaves nothing of {grace} "
            f"{grace_seconds:g} to upload in: raise {grace}, or lower the reserve"
        )


def is_url(text: str) -> bool:
    """Whether it is a URL of http or https with a host. With a raw / in its password, it is none."""
    try:
        parts = urlsplit(text)
        # What is no port raises ValueError too.
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and " " not in text
    except ValueError:
        return False


def _is_address(text: str) -> bool:
    match = re.fullmatch(r"(\[[^\]]*\]|[^:]*):(\d{1,5})", text)
    return match is not None and 1 <= int(match[2]) <= 65535


def _is_below(path: str, directory: str) -> bool:
    """Compare paths as text. A `..` is not resolved, because a link may stand before it."""
    above = _components(directory)
    return _components(path)[: len(above)] == above


def _components(path: str) -> list[str]:
    """Return the root and the names between the slashes, without `.`. The root `//` differs from `/`."""
    root = path[: len(path) - len(path.lstrip("/"))]
    return [root, *(name for name in path.split("/") if name not in ("", "."))]
