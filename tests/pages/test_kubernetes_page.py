"""What docs/kubernetes.md tells people to paste is what the webhook injects."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jsonpatch
import kubernetes_validate
import pytest
import yaml
from tests.chart.rendering import of_kind, render

from keepstep_agent.core.injection.annotations import read_annotations
from keepstep_agent.core.injection.mutation import mutate
from keepstep_agent.core.injection.spec import Injection, InjectionDefaults, Mutation
from keepstep_api import names

_ROOT: Final = Path(__file__).parents[2]
_PAGE: Final = _ROOT / "docs" / "kubernetes.md"
_KINDS: Final = {"Job", "JobSet", "TrainJob", "PyTorchJob", "LeaderWorkerSet"}


def _blocks(page: Path) -> list[Any]:
    blocks = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    return [one for block in blocks for one in yaml.safe_load_all(block)]


def _objects() -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in _blocks(_PAGE) if "kind" in one}


def _workloads(kind: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every Job, also of a JobSet, or every Deployment that our pages and examples show, and where."""
    pages = [*_ROOT.glob("*.md"), *(_ROOT / "docs").rglob("*.md"), *(_ROOT / "examples").rglob("*.md")]
    examples = [path for path in (_ROOT / "examples").rglob("*.y*ml") if "node_modules" not in path.parts]
    found = [(page, one) for page in pages for one in _blocks(page)]
    found += [(path, one) for path in examples for one in yaml.safe_load_all(path.read_text())]
    for path, value in found:
        match value:
            case {"kind": "JobSet", "spec": {"replicatedJobs": jobs}} if kind == "Job":
                yield from ((path, job["template"]) for job in jobs)
            case {"kind": "CronJob", "spec": {"jobTemplate": job}} if kind == "Job":
                yield path, job
            case {"kind": found_kind} if found_kind == kind:
                yield path, value


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


def test_the_next_pod_of_its_first_job_starts_when_the_old_one_has_ended() -> None:
    job = next(one for one in _blocks(_PAGE) if one.get("kind") == "Job")
    assert job["spec"]["podReplacementPolicy"] == "Failed"
    # With what the page says to add, the API server takes no other value.
    (policy,) = [one for one in _blocks(_PAGE) if "podFailurePolicy" in one]
    for spec in (job["spec"], job["spec"] | policy):
        kubernetes_validate.validate(job | {"spec": spec}, "1.33", strict=True)


def test_no_pod_that_we_show_starts_beside_the_one_that_it_replaces() -> None:
    jobs = list(_workloads("Job"))
    assert len(jobs) >= 2
    assert [path for path, job in jobs if job["spec"].get("podReplacementPolicy") != "Failed"] == []
    deployments = list(_workloads("Deployment"))
    assert [path for path, one in deployments if one["spec"].get("strategy") != {"type": "Recreate"}] == []
    assert "`strategy: {type: Recreate}`" in _PAGE.read_text()


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
