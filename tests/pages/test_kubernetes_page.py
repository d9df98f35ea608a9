"""What docs/kubernetes.md tells people to paste is what the webhook injects."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jsonpatch
import pytest
import yaml
from tests.chart.rendering import of_kind, render

from keepstep_agent.core.injection.annotations import read_annotations
from keepstep_agent.core.injection.mutation import mutate
from keepstep_agent.core.injection.spec import Injection, InjectionDefaults, Mutation
from keepstep_api import names

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
    defaults = InjectionDefaults(image="registry.example/keepstep:1")
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


def test_the_guard_for_a_reinstallation_refuses_what_the_charts_own_configuration_selects() -> None:
    """With the page's own filter, as `kubectl create` takes it: nothing of the object that it was copied from."""
    copying = r"get mutatingwebhookconfiguration (\S+) --output json \\\n +\| jq '(.*)' \|"
    ((name, program),) = re.findall(copying, _PAGE.read_text())
    chart = of_kind(render(), "MutatingWebhookConfiguration")
    assert chart["metadata"]["name"] == name
    if not shutil.which("jq"):
        pytest.skip("jq is not installed")
    stored = {**chart, "metadata": {**chart["metadata"], "resourceVersion": "1", "uid": "a-b"}}
    guard = json.loads(subprocess.check_output(["jq", program], input=json.dumps(stored), text=True))
    assert guard == {**chart, "metadata": {"name": "keepstep-guard"}}
    assert f"delete mutatingwebhookconfiguration {guard['metadata']['name']}\n" in _PAGE.read_text()


def test_a_pod_whose_agent_is_down_is_what_it_says_it_is_shown_as() -> None:
    defaults = InjectionDefaults(image="registry.example/keepstep:1")
    (template,) = _templates(_objects()["Job"])
    injection = read_annotations(template["metadata"]["annotations"], defaults)
    assert isinstance(injection, Injection)
    mutation = mutate(template, injection, defaults)
    assert isinstance(mutation, Mutation)
    injected = jsonpatch.apply_patch(template, list(mutation.patch))
    assert f"`Init:1/{len(injected['spec']['initContainers'])}`" in _PAGE.read_text()


def test_it_names_the_port_of_the_agents_metrics() -> None:
    assert f"port {names.POD_METRICS_PORT} of the pod" in _PAGE.read_text()
