"""Who is warned that a new pod may start while the old one still saves: by the expressions, as celpy evaluates them.

celpy knows no types: that the API server compiles them against the schemas of Jobs and Deployments is not shown here.
"""

from typing import Any

import celpy
import pytest
from celpy.adapter import json_to_cel
from tests.chart.rendering import Object, of_kind, render
from tests.chart.values_matrix import MATRIX

JOBS, DEPLOYMENTS = "keepstep-jobs", "keepstep-deployments"
ASKS = {"keepstep.dev/inject": "true", "keepstep.dev/destination": "s3://bucket/run"}


@pytest.fixture(scope="module")
def policies() -> dict[str, Object]:
    """The specs, by name."""
    return {one["metadata"]["name"]: one["spec"] for one in render() if one["kind"] == "ValidatingAdmissionPolicy"}


def warnings(policy: Object, workload: Object) -> list[str]:
    """As the API server does it: all conditions must hold, and each validation that does not is a warning."""
    environment, review = celpy.Environment(), {"object": json_to_cel(workload)}

    def holds(one: Object) -> bool:
        result = environment.program(environment.compile(one["expression"])).evaluate(review)
        assert isinstance(result, celpy.celtypes.BoolType)
        return bool(result)

    if not all(map(holds, policy["matchConditions"])):
        return []
    return [one["message"] for one in policy["validations"] if not holds(one)]


def workload(annotations: dict[str, str] | None = ASKS, **spec: Any) -> Object:
    metadata = {} if annotations is None else {"metadata": {"annotations": annotations}}
    return {"metadata": {"name": "llama"}, "spec": {**spec, "template": {**metadata, "spec": {}}}}


POLICY_OF_FAILURES = {"rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}]}


@pytest.mark.parametrize(
    ("spec", "is_warned"),
    [
        # With what the API server fills in, and without.
        ({}, True),
        ({"podReplacementPolicy": "TerminatingOrFailed"}, True),
        ({"podReplacementPolicy": "Failed"}, False),
        ({"podFailurePolicy": POLICY_OF_FAILURES}, False),
        ({"podFailurePolicy": POLICY_OF_FAILURES, "podReplacementPolicy": "Failed"}, False),
    ],
    ids=str,
)
def test_a_job_that_does_not_wait_for_the_old_pods_end_is_warned_of(
    policies: dict[str, Object], spec: Object, is_warned: bool
) -> None:
    said = warnings(policies[JOBS], workload(**spec))
    assert len(said) == is_warned
    assert all("hint: set podReplacementPolicy: Failed" in one for one in said)


@pytest.mark.parametrize(
    ("spec", "is_warned"),
    [
        ({}, True),
        ({"strategy": {}}, True),
        ({"strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0}}}, True),
        ({"strategy": {"type": "Recreate"}}, False),
    ],
    ids=str,
)
def test_a_deployment_whose_update_overlaps_is_warned_of(
    policies: dict[str, Object], spec: Object, is_warned: bool
) -> None:
    said = warnings(policies[DEPLOYMENTS], workload(**spec))
    assert len(said) == is_warned
    assert all("hint: set strategy: {type: Recreate}" in one for one in said)


@pytest.mark.parametrize("name", [JOBS, DEPLOYMENTS])
@pytest.mark.parametrize(
    ("annotations", "is_warned"),
    [
        (ASKS, True),
        ({"keepstep.dev/inject": "True"}, True),
        ({"keepstep.dev/inject": "false"}, False),
        ({"keepstep.dev/inject": "untrue"}, False),
        ({"keepstep.dev/destination": "s3://bucket/run"}, False),
        ({"prometheus.io/scrape": "true"}, False),
        ({}, False),
        (None, False),
    ],
    ids=str,
)
def test_only_what_asks_for_keepstep_is_looked_at(
    policies: dict[str, Object], name: str, annotations: dict[str, str] | None, is_warned: bool
) -> None:
    assert bool(warnings(policies[name], workload(annotations))) is is_warned


def test_nothing_is_refused_whatever_goes_wrong() -> None:
    objects = render()
    for name in (JOBS, DEPLOYMENTS):
        assert of_kind(objects, "ValidatingAdmissionPolicy", name)["spec"]["failurePolicy"] == "Ignore"
        binding = of_kind(objects, "ValidatingAdmissionPolicyBinding", name)["spec"]
        assert binding == {"policyName": name, "validationActions": ["Warn", "Audit"]}


def test_jobs_are_seen_when_they_are_made_and_deployments_when_they_change(policies: dict[str, Object]) -> None:
    (jobs,) = policies[JOBS]["matchConstraints"]["resourceRules"]
    (deployments,) = policies[DEPLOYMENTS]["matchConstraints"]["resourceRules"]
    assert (jobs["apiGroups"], jobs["resources"], jobs["operations"]) == (["batch"], ["jobs"], ["CREATE"])
    assert (deployments["apiGroups"], deployments["resources"]) == (["apps"], ["deployments"])
    # A rolling update begins with a change of the Deployment.
    assert deployments["operations"] == ["CREATE", "UPDATE"]


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_they_look_where_the_webhook_does(values: dict[str, Any]) -> None:
    objects = render(values)
    (webhook,) = of_kind(objects, "MutatingWebhookConfiguration")["webhooks"]
    for one in objects:
        if one["kind"] == "ValidatingAdmissionPolicy":
            assert one["spec"]["matchConstraints"]["namespaceSelector"] == webhook["namespaceSelector"]


def test_values_and_an_older_kubernetes_leave_them_out() -> None:
    kinds = {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}

    def rendered(*arguments: str, enabled: bool = True) -> set[str]:
        return {one["kind"] for one in render({"admissionPolicies": {"enabled": enabled}}, *arguments)} & kinds

    assert rendered() == kinds
    assert rendered("--kube-version", "v1.30.0-gke.1") == kinds
    assert rendered("--kube-version", "v1.29.15-eks-1234567") == set()
    assert rendered(enabled=False) == set()


def test_the_charts_own_deployments_are_not_warned_of(policies: dict[str, Object]) -> None:
    for one in render(MATRIX["the console, with a token"]):
        if one["kind"] == "Deployment":
            assert warnings(policies[DEPLOYMENTS], one) == []
