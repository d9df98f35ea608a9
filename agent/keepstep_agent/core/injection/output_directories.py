"""Mounts the checkpoint volume where a program writes that knows nothing of Keepstep, and chooses what is watched.

Each directory of `keepstep.dev/output` is a directory of the checkpoint volume with the same last name. The trainer has
it at the path that it writes to, as a subPath. Agent and restore have it in the whole volume, where they can link its
files.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from keepstep_agent.core.injection.pod import Container, is_at_or_below, last_name, overlap, plain, present
from keepstep_agent.core.injection.spec import Injection
from keepstep_agent.core.injection.volumes import CheckpointPlace
from keepstep_agent.core.settings.table import setting_fields, text_of
from keepstep_api.names import ANNOTATION_PREFIX

_OUTPUT: Final = f"{ANNOTATION_PREFIX}output"
_WATCH: Final = next(setting for setting in setting_fields() if setting.key == "watch")
_CHECKPOINT_DIRECTORY: Final = f"{ANNOTATION_PREFIX}checkpoint-directory"


def missing_mounts(trainer: Container, place: CheckpointPlace, injection: Injection) -> list[dict[str, Any]]:
    """Return the mounts that the trainer lacks for the directories that it writes to."""
    there = {plain(present(mount, "mountPath", "")) for mount in present(trainer, "volumeMounts", [])}
    return [_mount(path, place) for path in injection.output if path not in there]


def watch_texts(place: CheckpointPlace, injection: Injection) -> dict[str, str]:
    """Return the variable that tells agent and restore what to watch; empty if that is the default."""
    if injection.watch and not injection.output:
        return {}
    checkpoint_directory = (place.directory,) if injection.watch else ()
    outputs = (f"{place.mount_path}/{last_name(path)}" for path in injection.output)
    return {_WATCH.environment: text_of(_WATCH, (*checkpoint_directory, *outputs))}


def output_problems(trainer: Container, place: CheckpointPlace, injection: Injection) -> Iterator[str]:
    """Yield why the volume cannot be mounted where the program writes."""
    if injection.output and place.directory == place.mount_path:
        yield (
            f"{_OUTPUT} would put its directories into the checkpoint directory {place.directory}: choose a "
            f"{_CHECKPOINT_DIRECTORY} below a volume's mount, or leave that annotation out and give {place.directory} "
            f"in {_OUTPUT} too"
        )
        return
    for path in injection.output:
        if overlap(path, place.mount_path):
            yield _on_the_volume(path, place)
            continue
        if problem := _name_problem(path, place):
            yield problem
        yield from _mount_problems(trainer, path, _mount(path, place))


def _mount(path: str, place: CheckpointPlace) -> dict[str, Any]:
    return {"name": place.volume, "mountPath": path, "subPath": last_name(path)}


def _on_the_volume(path: str, place: CheckpointPlace) -> str:
    if is_at_or_below(path, place.directory):
        return (
            f"{_OUTPUT} {path} lies in the checkpoint directory {place.directory}: leave it out, for Keepstep keeps "
            f"snapshots of that directory unless {ANNOTATION_PREFIX}watch is off"
        )
    where = f"checkpoints lie on the volume {place.volume} at {place.mount_path}"
    if is_at_or_below(path, place.mount_path):
        return f"{where}, and {_OUTPUT} {path} does too: give it as {_CHECKPOINT_DIRECTORY} instead"
    return f"{where}, inside {_OUTPUT} {path}: choose another {_CHECKPOINT_DIRECTORY}"


def _name_problem(path: str, place: CheckpointPlace) -> str:
    """Return a problem if the directory would hold the checkpoint directory, or if both have the same last name."""
    folders = place.directory.removeprefix(place.mount_path).strip("/").split("/")
    if last_name(path) not in (folders[0], folders[-1]):
        return ""
    return (
        f"{_OUTPUT} {path} would be {place.mount_path}/{last_name(path)} on the volume, and the checkpoint directory "
        f"{place.directory} has that name too: choose another {_CHECKPOINT_DIRECTORY}, such as "
        f"{place.mount_path}/announced"
    )


def _mount_problems(trainer: Container, path: str, wanted: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for each of the trainer's mounts that is at, above or below `path` and not the wanted one."""
    for mount in present(trainer, "volumeMounts", []):
        mount_path = plain(present(mount, "mountPath", ""))
        if not overlap(path, mount_path) or _is_the_same(mount, wanted):
            continue
        said = f"the trainer mounts {mount.get('name')} at {mount_path}"
        if is_at_or_below(path, mount_path):
            yield (
                f"{said}, where {_OUTPUT} {path} lies: give {path} as {_CHECKPOINT_DIRECTORY} instead, and checkpoints "
                "stay on that volume, or mount yours elsewhere"
            )
        else:
            yield f"{said}, inside {_OUTPUT} {path}: mount yours elsewhere, for a snapshot would not hold its files"


def _is_the_same(mount: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a mount is the wanted one, which an earlier injection or the user wrote."""
    return (
        plain(present(mount, "mountPath", "")) == wanted["mountPath"]
        and mount.get("name") == wanted["name"]
        and mount.get("subPath") == wanted["subPath"]
        and not mount.get("subPathExpr")
        and not mount.get("readOnly")
    )
