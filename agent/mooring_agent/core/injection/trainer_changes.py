"""Adds mounts and variables to the container that trains.

Nothing that the user wrote is removed or changed, except that autoload puts its folder at the start of PYTHONPATH. Our
variables come first: the user's may refer to them, and ours refer to none.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from mooring_agent.core.injection.pod import Container, Findings, plain, present, value_of, variable
from mooring_agent.core.injection.volumes import CheckpointPlace
from mooring_api import names

_PREFIX: Final = "MOORING_"
_SHUTDOWN_RESERVE_SECONDS: Final = 5
_SHUTDOWN_LEAST_SECONDS: Final = 30
"""torchrun's own default."""


def trainer_variables(
    place: CheckpointPlace,
    *,
    socket: str,
    attempt: Mapping[str, Any] | None,
    grace_seconds: int,
    temporary_files: bool,
) -> list[dict[str, Any]]:
    """Return the `env` entries for the trainer; `attempt` is one.

    `temporary_files`: set TMPDIR to the checkpoints' volume.
    """
    shutdown_seconds = max(_SHUTDOWN_LEAST_SECONDS, grace_seconds - _SHUTDOWN_RESERVE_SECONDS)
    entries: list[dict[str, Any]] = [
        {"name": names.ENV_VOLUME, "value": place.mount_path},
        {"name": names.ENV_CHECKPOINT_DIRECTORY, "value": place.directory},
        {"name": names.ENV_SOCKET, "value": socket},
    ]
    if attempt:
        entries.append(dict(attempt))
    entries += [
        {"name": names.ENV_GRPC_FORK_HANDLERS, "value": "0"},
        {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(shutdown_seconds)},
    ]
    if temporary_files:
        entries.append({"name": "TMPDIR", "value": place.mount_path})
    return entries


def changed_trainer(
    trainer: Container,
    *,
    variables: Sequence[dict[str, Any]],
    mounts: Sequence[Mapping[str, Any]],
    python_path: str,
    injected: bool,
    findings: Findings,
) -> dict[str, Any]:
    """Return the trainer with `variables` and `mounts`. `python_path` is autoload's folder; empty without autoload.

    `injected`: the pod was injected before, so a differing variable of ours is from then and is replaced.
    """
    entries = list(present(trainer, "env", []))
    missing = []
    for wanted in variables:
        name = wanted["name"]
        found = variable(trainer, name)
        if found is None:
            missing.append(wanted)
        elif name.startswith(_PREFIX) and not _same(found, wanted):
            if injected:
                entries = [wanted if entry is found else entry for entry in entries]
            else:
                findings.problems.append(_contradiction(trainer, wanted))
    if python_path:
        missing += _python_path(trainer, python_path, entries, findings)
    changed = {**trainer, "volumeMounts": _with_mounts(trainer, mounts, findings)}
    if missing or entries:
        changed["env"] = [*missing, *entries]
    return changed


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
                f"the trainer mounts {there.get('name')} at {path}, where Mooring mounts its {mount['name']}: "
                "mount yours elsewhere"
            )
    return mounts
