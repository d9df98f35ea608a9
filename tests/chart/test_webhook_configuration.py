"""Which pods wait for the webhook: all that name us in an annotation, also by mistake, and no other."""

from typing import Any

import celpy
import pytest
from celpy.adapter import json_to_cel
from tests.chart.rendering import NAMESPACE, Object, of_kind, render
from tests.chart.values_matrix import MATRIX

from keepstep_agent.core.injection.annotation_table import WRITTEN_BY_US, known_keys


def webhook_of(values: dict[str, Any]) -> Object:
    (webhook,) = of_kind(render(values), "MutatingWebhookConfiguration")["webhooks"]
    return dict(webhook)


@pytest.fixture(scope="module")
def webhook() -> Object:
    return webhook_of({})


def is_asked(webhook: Object, pod: Object) -> bool:
    """As the API server evaluates it: all conditions must hold."""
    environment = celpy.Environment()
    review = {"object": json_to_cel(pod)}
    results = [
        environment.program(environment.compile(condition["expression"])).evaluate(review)
        for condition in webhook["matchConditions"]
    ]
    assert results
    assert all(isinstance(result, celpy.celtypes.BoolType) for result in results)
    return all(results)


@pytest.mark.parametrize(
    "annotations",
    [
        {"keepstep.dev/inject": "true"},
        {"keepstep.dev/inject": "false"},
        {"keepstep.dev/injct": "true"},
        {"keepstep.dev/": ""},
        {"keepstep.dev/destination": "s3://bucket/run"},
        {"prometheus.io/scrape": "true", "keepstep.dev/inject": "true", "a": "b"},
        *({key: ""} for key in known_keys()),
        *({field.key: ""} for field in WRITTEN_BY_US),
    ],
    ids=lambda annotations: " ".join(annotations),
)
def test_a_pod_with_any_annotation_of_ours_waits_for_the_webhook(webhook: Object, annotations: dict[str, str]) -> None:
    assert is_asked(webhook, {"metadata": {"generateName": "train-", "annotations": annotations}, "spec": {}})


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"name": "train"},
        {"annotations": {}},
        {"annotations": {"prometheus.io/scrape": "true"}},
        {"annotations": {"inject": "true"}},
        {"annotations": {"example.com/keepstep.dev/inject": "true"}},
        {"annotations": {"not-keepstep.dev/inject": "true"}},
        {"annotations": {"keepstep.dev.example.com/inject": "true"}},
        {"annotations": {"note": "keepstep.dev/inject"}},
        {"labels": {"keepstep.dev/inject": "true"}},
    ],
    ids=str,
)
def test_no_other_pod_waits_for_the_webhook(webhook: Object, metadata: Object) -> None:
    assert not is_asked(webhook, {"metadata": metadata, "spec": {}})


def test_only_the_creation_of_pods_is_asked_about(webhook: Object) -> None:
    assert webhook["rules"] == [
        {
            "apiGroups": [""],
            "apiVersions": ["v1"],
            "resources": ["pods"],
            "operations": ["CREATE"],
            "scope": "Namespaced",
        }
    ]


def test_a_dry_run_is_answered_and_a_pod_that_others_changed_is_seen_again(webhook: Object) -> None:
    assert webhook["sideEffects"] == "None"
    assert webhook["reinvocationPolicy"] == "IfNeeded"


def test_what_was_asked_for_is_injected_or_the_pod_is_refused_unless_values_say_otherwise(webhook: Object) -> None:
    assert (webhook["failurePolicy"], webhook["timeoutSeconds"]) == ("Fail", 5)
    lenient = webhook_of(MATRIX["lenient, in some namespaces alone"])
    assert (lenient["failurePolicy"], lenient["timeoutSeconds"]) == ("Ignore", 10)


def test_its_own_namespace_and_kube_system_are_never_asked_about(webhook: Object) -> None:
    expressions = [{"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": [NAMESPACE, "kube-system"]}]
    assert webhook["namespaceSelector"] == {"matchExpressions": expressions}


def test_values_exclude_and_choose_namespaces() -> None:
    assert webhook_of(MATRIX["lenient, in some namespaces alone"])["namespaceSelector"] == {
        "matchLabels": {"training": "true"},
        "matchExpressions": [
            {
                "key": "kubernetes.io/metadata.name",
                "operator": "NotIn",
                "values": [NAMESPACE, "kube-system", "kube-public", "gatekeeper-system"],
            },
            {"key": "tier", "operator": "In", "values": ["gpu", "cpu"]},
        ],
    }


def test_nobody_but_the_webhook_or_cert_manager_writes_the_bundle() -> None:
    """One that is rendered would be put back at every upgrade."""
    for values in MATRIX.values():
        assert "caBundle" not in webhook_of(values)["clientConfig"]


def test_cert_manager_is_told_of_which_certificate_the_bundle_is() -> None:
    objects = render({"certManager": {"enabled": True}})
    annotations = of_kind(objects, "MutatingWebhookConfiguration")["metadata"]["annotations"]
    certificate = of_kind(objects, "Certificate", "keepstep-webhook")
    assert annotations == {"cert-manager.io/inject-ca-from": f"{NAMESPACE}/{certificate['metadata']['name']}"}
    assert "annotations" not in of_kind(render(), "MutatingWebhookConfiguration")["metadata"]
