"""What the injection makes of whole pods, as files that people read: `golden/*.yaml`.

The first document of each is written by hand: why the pod is there, the pod as its user wrote it, and what differs from
the ordinary admin's decisions. The second is made by `python -m tests.injection.golden`, which a person then reviews.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from mooring_agent import __version__
from mooring_agent.core.injection.annotations import read_annotations
from mooring_agent.core.injection.mutation import mutate
from mooring_agent.core.injection.spec import Injection, InjectionDefaults, Mutation, Refusal, Skip

FOLDER: Final = Path(__file__).parent / "golden"
_MADE: Final = "--- # Made by `python -m tests.injection.golden`.\n"
IMAGE: Final = "example.com/mooring:1"
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
        written, *made = yaml.safe_load_all(path.read_text())
        yield Case(
            path=path,
            why=written["why"],
            pod=written["pod"],
            defaults=InjectionDefaults(**{"image": IMAGE, **written.get("defaults", {})}),
            first_version=written.get("from", KUBERNETES[0]),
            made=made[0] if made else None,
        )


def described(outcome: Mutation | Refusal | Skip) -> dict[str, Any]:
    """As the file has it. A new version of Mooring is no change of the outcome."""
    match outcome:
        case Refusal():
            return {"refused": list(outcome.problems)}
        case Skip():
            return {"skipped": outcome.reason, "warned": outcome.warning}
        case Mutation():
            patch = [_without_version(operation) for operation in outcome.patch]
            return {"warnings": list(outcome.warnings), "patch": patch}


def _without_version(operation: dict[str, Any]) -> dict[str, Any]:
    if operation["path"] == "/metadata/annotations/mooring.dev~1injected":
        return {**operation, "value": operation["value"].replace(__version__, "VERSION")}
    return operation


class _Readable(yaml.SafeDumper):
    """Nothing is said by reference to another place."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def made_text(outcome: Mutation | Refusal | Skip) -> str:
    made = yaml.dump(
        described(outcome), Dumper=_Readable, sort_keys=False, width=118, allow_unicode=True, default_flow_style=None
    )
    return _MADE + made


def write_outcomes() -> None:
    """Makes the second document of every file anew."""
    for case in cases():
        by_hand = case.path.read_text().partition(_MADE)[0]
        case.path.write_text(by_hand + made_text(case.outcome()))
