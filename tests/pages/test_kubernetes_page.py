"""What docs/kubernetes.md tells people to paste is what the webhook injects."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from mooring_agent.core.annotations import read_annotations
from mooring_agent.core.injection.spec import Injection, InjectionDefaults, Mutation
from mooring_agent.core.pod_mutation import mutate
from mooring_api import names

_PAGE: Final = Path(__file__).parents[2] / "docs" / "kubernetes.md"
_KINDS: Final = {"Job", "JobSet", "TrainJob", "PyTorchJob", "LeaderWorkerSet"}


def _objects() -> dict[str, dict[str, Any]]:
    blocks = re.findall(r"```yaml\n(.*?)```", _PAGE.read_text(), re.DOTALL)
    parsed = [yaml.safe_load(block) for block in blocks]
    return {one["kind"]: one for one in parsed if "kind" in one}


def _templates(value: Any) -> Iterator[dict[str, Any]]:
    """Whatever has pod annotations of ours."""
    match value:
        case {"metadata": {"annotations": dict()}}:
            yield value
        case dict():
            for inner in value.values():
                yield from _templates(inner)
        case list():
            for inner in value:
                yield from _templates(inner)


def test_it_has_an_example_for_every_kind_of_job_that_it_names() -> None:
    assert set(_objects()) == _KINDS | {"RoleBinding"}


@pytest.mark.parametrize("kind", sorted(_KINDS))
def test_its_pods_are_injected(kind: str) -> None:
    defaults = InjectionDefaults(image="registry.example/mooring:1")
    templates = list(_templates(_objects()[kind]))
    assert templates
    for template in templates:
        injection = read_annotations(template["metadata"]["annotations"], defaults)
        assert isinstance(injection, Injection), injection
        # What a runtime patch leaves to the runtime.
        spec = template.get("spec") or {"containers": [{"name": "node", "image": "registry.example/train:1"}]}
        mutation = mutate({**template, "spec": spec}, injection, defaults)
        assert isinstance(mutation, Mutation), mutation
        assert mutation.patch


def test_it_names_the_port_of_the_agents_metrics() -> None:
    assert f"port {names.POD_METRICS_PORT} of the pod" in _PAGE.read_text()
