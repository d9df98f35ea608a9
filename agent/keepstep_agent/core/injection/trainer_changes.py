"""Adds mounts and variables to the container that trains.

Nothing that the user wrote is removed or changed, except that autoload puts its folder at the start of PYTHONPATH. Our
variables come first: the user's may refer to them, and ours refer to none.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from keepstep_agent.core.injection import volumes
from keepstep_agent.core.injection.containers import POD_SOCKET
from keepstep_agent.core.injection.output_directories import missing_mounts
from keepstep_agent.core.injection.pod import Container, Findings, plain, present, value_of, variable
from keepstep_agent.core.injection.spec import Injection
from keepstep_agent.core.injection.volumes import CheckpointPlace
from keepstep_api import names

_PREFIX: Final = "KEEPSTEP_"
_SHUTDOWN_RESERVE_SECONDS: Final = 5
_SHUTDOWN_LEAST_SECONDS: Final = 30
"""torchrun's own default."""


def changed_trainer(
    trainer: Container,
    place: CheckpointPlace,
    injection: Injection,
    *,
    attempt: Mapping[str, Any] | None,
    grace_seconds: int,
    injected: bool,
    findings: Findings,
) -> dict[str, Any]:
    """Return the trainer with its mounts and variables. `attempt` is an entry of `env`.

    `injected`: the pod was injected before, so a differing variable of ours is from then and is replaced.
    """
    entries = list(present(trainer, "env", []))
    missing = []
    for wanted in _variables(place, injection, attempt, grace_seconds):
        name = wanted["name"]
        found = variable(trainer, name)
        if found is None:
            missing.append(wanted)
        elif name.startswith(_PREFIX) and not _same(found, wanted):
            if injected:
                entries = [wanted if entry is found else entry for entry in entries]
            else:
                findings.problems.append(_contradiction(trainer, wanted))
    # Read-only, so that the trainer cannot replace the agent's socket. Connecting needs no write access to the mount.
    mounts = [place.mount, *missing_mounts(trainer, place, injection), {**volumes.SOCKET_MOUNT, "readOnly": True}]
    if injection.autoload:
        mounts.append({**volumes.AUTOLOAD_MOUNT, "readOnly": True})
        missing += _python_path(trainer, names.POD_AUTOLOAD_PATH, entries, findings)
    changed = {**trainer, "volumeMounts": _with_mounts(trainer, mounts, findings)}
    if missing or entries:
        changed["env"] = [*missing, *entries]
    return changed


def _variables(
    place: CheckpointPlace, injection: Injection, attempt: Mapping[str, Any] | None, grace_seconds: int
) -> list[dict[str, Any]]:
    shutdown_seconds = max(_SHUTDOWN_LEAST_SECONDS, grace_seconds - _SHUTDOWN_RESERVE_SECONDS)
    entries = [
        {"name": names.ENV_VOLUME, "value": place.mount_path},
        {"name": names.ENV_CHECKPOINT_DIRECTORY, "value": place.directory},
        {"name": names.ENV_SOCKET, "value": POD_SOCKET},
        {"name": names.ENV_START, "value": names.CONTAINER},
        *([dict(attempt)] if attempt else []),
        *([{"name": names.ENV_RESTORE, "value": names.LAZY}] if injection.restores_lazily else []),
        {"name": names.ENV_GRPC_FORK_HANDLERS, "value": "0"},
        {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(shutdown_seconds)},
    ]
    if injection.output:
        entries.append({"name": names.ENV_WATCHED, "value": ":".join(injection.output)})
    if injection.asynchronous_saves is not None:
        value = "true" if injection.asynchronous_saves else "false"
        entries.append({"name": names.ENV_ASYNCHRONOUS_SAVES, "value": value})
    if injection.temporary_files:
        entries.append({"name": "TMPDIR", "value": place.mount_path})
    return entries


def _contradiction(trainer: Container, wanted: Mapping[str, Any]) -> str:
    name = wanted["name"]
    said = value_of(trainer, name)
    shown = "from another object" if said is None else repr(said)
    value = wanted.get("value")
    how = f"to {value}" if value else "from another object"
    return f"the trainer sets {name} {shown}, and the injection would set it {how}: remove it from the trainer's env"


def _same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    if wanted.get("valueFrom") or found.get("valueFrom"):
        return bool(found.get("valueFrom") == wanted.get("valueFrom"))
    return bool(plain(present(found, "value", "")) == plain(present(wanted, "value", "")))


def _python_path(
    trainer: Container, folder: str, entries: list[dict[str, Any]], findings: Findings
) -> list[dict[str, Any]]:
    """Return PYTHONPATH if the trainer has none; else put the folder at the start of the one in `entries`."""
    found = variable(trainer, "PYTHONPATH")
    if found is None:
        where = "image or envFrom has" if present(trainer, "envFrom", []) else "image has"
        findings.warnings.append(
            f"autoload sets PYTHONPATH: if the trainer's {where} one of its own, write that into the pod's env, "
            "and it is kept"
        )
        return [{"name": "PYTHONPATH", "value": folder}]
    said = value_of(trainer, "PYTHONPATH")
    if said is None:
        findings.problems.append(
            f"{names.ANNOTATION_PREFIX}autoload cannot go before a PYTHONPATH that comes from another object: "
            "write its value into the pod, or leave autoload off"
        )
        return []
    folders = said.split(":")
    if folder not in folders:
        value = f"{folder}:{said}" if said else folder
        entries[:] = [{**entry, "value": value} if entry is found else entry for entry in entries]
    return []


def _with_mounts(trainer: Container, wanted: Sequence[Mapping[str, Any]], findings: Findings) -> list[Any]:
    mounts = list(present(trainer, "volumeMounts", []))
    for mount in wanted:
        path = plain(mount["mountPath"])
        there = next((one for one in mounts if plain(present(one, "mountPath", "")) == path), None)
        if there is None:
            mounts.append(dict(mount))
        elif there.get("name") != mount["name"]:
            findings.problems.append(
                f"the trainer mounts {there.get('name')} at {path}, where Keepstep mounts its {mount['name']}: "
                "mount yours elsewhere"
            )
    return mounts
