"""A pod of one container, what the injection makes of it, and where to look then."""

import copy
from typing import Any

import jsonpatch
from tests.injection.golden_pods import IMAGE

from keepstep_agent.core.injection.mutation import mutate
from keepstep_agent.core.injection.spec import Injection, InjectionDefaults, Mutation, Refusal

DEFAULTS = InjectionDefaults(image=IMAGE)
ASKED = Injection(destination="s3://bucket/run", run_as_user=1000)


def pod(**spec: Any) -> dict[str, Any]:
    containers = [{"name": "train", "image": "example.com/train:1"}]
    return {
        "metadata": {"generateName": "train-"},
        "spec": {"restartPolicy": "Never", "containers": containers, **spec},
    }


def trainer(**fields: Any) -> dict[str, Any]:
    return {"name": "train", "image": "example.com/train:1", **fields}


def mutated(before: dict[str, Any], asked: Injection = ASKED, defaults: InjectionDefaults = DEFAULTS) -> Any:
    outcome = mutate(before, asked, defaults)
    assert isinstance(outcome, Mutation), outcome
    return jsonpatch.apply_patch(copy.deepcopy(before), copy.deepcopy(list(outcome.patch)))


def problems(before: Any, asked: Injection = ASKED) -> tuple[str, ...]:
    outcome = mutate(before, asked, DEFAULTS)
    assert isinstance(outcome, Refusal), outcome
    return outcome.problems


def without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def container(of: Any, name: str) -> Any:
    spec = of["spec"]
    (found,) = [one for one in [*spec["initContainers"], *spec["containers"]] if one["name"] == name]
    return found


def variables(of: Any, name: str) -> dict[str, str]:
    return {entry["name"]: entry.get("value") for entry in container(of, name).get("env", [])}
