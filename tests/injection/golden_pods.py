"""What the injection makes of whole pods, as files that people read: `golden/*.yaml`.

The first document of each is written by hand: why the pod is there, the pod as its user wrote it, and what differs from
the ordinary admin's decisions. The second is made by `python -m tests.injection.golden`, which a person then reviews.
That of `simple-job-pod.yaml` is the whole patch; the others have what their patch differs in from that one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from keepstep_agent import __version__
from keepstep_agent.core.injection.annotations import read_annotations
from keepstep_agent.core.injection.mutation import mutate
from keepstep_agent.core.injection.spec import Injection, InjectionDefaults, Mutation, Refusal, Skip

FOLDER: Final = Path(__file__).parent / "golden"
_BASE: Final = "simple-job-pod"
_MADE: Final = "--- # Made by `python -m tests.injection.golden`.\n"
IMAGE: Final = "example.com/keepstep:1"
KUBERNETES: Final = tuple(f"1.{minor}" for minor in range(29, 38))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One file. `made` is what it says of the outcome; None in a new one."""

    path: Path
    why: str
    pod: dict[str, Any]
    defaults: InjectionDefaults
    first_version: str
    made: Any

    def outcome(self) -> Mutation | Refusal | Skip:
        return inject(self.pod, self.defaults)

    @property
    def versions(self) -> tuple[str, ...]:
        """Those of Kubernetes that know what the pod has."""
        return KUBERNETES[KUBERNETES.index(self.first_version) :]


def inject(pod: dict[str, Any], defaults: InjectionDefaults) -> Mutation | Refusal | Skip:
    asked = read_annotations(pod["metadata"].get("annotations", {}), defaults)
    return mutate(pod, asked, defaults) if isinstance(asked, Injection) else asked


def cases() -> Iterator[Case]:
    for path in sorted(FOLDER.glob("*.yaml")):
        yield _read(path)


def _read(path: Path) -> Case:
    written, *made = yaml.safe_load_all(path.read_text())
    return Case(
        path=path,
        why=written["why"],
        pod=written["pod"],
        defaults=InjectionDefaults(**{"image": IMAGE, **written.get("defaults", {})}),
        first_version=written.get("from", KUBERNETES[0]),
        made=made[0] if made else None,
    )


def described(case: Case) -> dict[str, Any]:
    """The outcome as the file has it."""
    match outcome := case.outcome():
        case Refusal():
            return {"refused": list(outcome.problems)}
        case Skip():
            return {"skipped": outcome.reason, "warned": outcome.warning}
        case Mutation():
            warnings = list(outcome.warnings)
            if case.path.stem == _BASE:
                return {"warnings": warnings, "patch": _operations(outcome)}
            return {"warnings": warnings, **_difference(_base(), _by_path(_operations(outcome)))}


@cache
def _base() -> dict[str, Any]:
    outcome = _read(FOLDER / f"{_BASE}.yaml").outcome()
    assert isinstance(outcome, Mutation)
    return _by_path(_operations(outcome))


def _difference(base: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """By path: what is new or has another value than in the base, and what is in the base alone."""
    differs: dict[str, Any] = {}
    without: list[str] = []

    def compare(path: str, base: dict[str, Any], found: dict[str, Any]) -> None:
        without.extend(f"{path}{key}" for key in base if key not in found)
        for key, value in found.items():
            if isinstance(value, dict) and isinstance(base.get(key), dict):
                compare(f"{path}{key}/", base[key], value)
            elif base.get(key) != value:
                differs[f"{path}{key}"] = value

    compare("", base, found)
    return {"differs": _Lines(differs), "without": without}


def _by_path(operations: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The patch's values by their paths. Entries of lists have their names there; `positions` says where they go."""
    values: dict[str, Any] = {}
    for operation in operations:
        path, value = operation["path"], operation.get("value", operation["op"])
        above, _, last = path.rpartition("/")
        if isinstance(value, dict) and (last == "-" or last.isdecimal()):
            # An entry that is put into a list is as one of a whole list.
            entries = values.setdefault(above, {})
            entries |= _named([value])
            entries["positions"] = f"{entries.get('positions', '')} {last}".strip()
        else:
            values[path] = _named(value)
    return values


def _named(value: Any) -> Any:
    """With a mapping by name in place of every list of entries that have one."""
    if isinstance(value, dict):
        return {key: _named(inner) for key, inner in value.items()}
    if not isinstance(value, list) or not all(isinstance(entry, dict) and "name" in entry for entry in value):
        return value
    # A volume may be mounted twice.
    key = "mountPath" if all("mountPath" in entry for entry in value) else "name"
    return {entry[key]: _named({name: inner for name, inner in entry.items() if name != key}) for entry in value}


def _operations(outcome: Mutation) -> list[dict[str, Any]]:
    """A new version of Keepstep is no change of the outcome."""
    return [_without_version(operation) for operation in outcome.patch]


def _without_version(operation: dict[str, Any]) -> dict[str, Any]:
    if operation["path"] == "/metadata/annotations/keepstep.dev~1injected":
        return {**operation, "value": operation["value"].replace(__version__, "VERSION")}
    return operation


class _Lines(dict[str, Any]):
    """A mapping that is written with a line for each key."""


class _Readable(yaml.SafeDumper):
    """Nothing is said by reference to another place."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Readable.add_representer(
    _Lines, lambda dumper, lines: dumper.represent_mapping("tag:yaml.org,2002:map", lines, flow_style=False)
)


def made_text(case: Case) -> str:
    made = yaml.dump(
        described(case), Dumper=_Readable, sort_keys=False, width=118, allow_unicode=True, default_flow_style=None
    )
    return _MADE + made


def write_outcomes() -> None:
    """Makes the second document of every file anew."""
    for case in cases():
        by_hand = case.path.read_text().partition(_MADE)[0]
        case.path.write_text(by_hand + made_text(case))
