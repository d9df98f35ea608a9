"""What the webhook may do in its cluster and on its network: what its certificates need, by name, and nothing else."""

from typing import Any

import pytest
from tests.chart.rendering import NAMESPACE, Object, arguments_of, of_kind, render, webhook_pod
from tests.chart.values_matrix import MATRIX

from keepstep_agent.cli.webhook import _settings, webhook
from keepstep_agent.webhook.settings import SelfManaged

SELF_MANAGED = {case: values for case, values in MATRIX.items() if not values.get("certManager", {}).get("enabled")}
CERT_MANAGER = {case: values for case, values in MATRIX.items() if case not in SELF_MANAGED}


def managed_by(objects: list[Object]) -> SelfManaged | None:
    """As the webhook understands its flags."""
    command, *flags = arguments_of(objects)
    assert command == webhook.name
    return _settings(webhook.make_context(command, flags).params).self_managed


@pytest.mark.parametrize("values", SELF_MANAGED.values(), ids=SELF_MANAGED)
def test_it_may_read_and_patch_its_own_two_objects_by_name(values: dict[str, Any]) -> None:
    objects = render(values)
    managed = managed_by(objects)
    assert managed is not None
    assert of_kind(objects, "Role")["rules"] == [
        {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [managed.secret], "verbs": ["get", "patch"]},
    ]
    account = of_kind(objects, "ServiceAccount")["metadata"]["name"]
    assert of_kind(objects, "ClusterRole", account)["rules"] == [
        {
            "apiGroups": ["admissionregistration.k8s.io"],
            "resources": ["mutatingwebhookconfigurations"],
            "resourceNames": [managed.configuration],
            "verbs": ["get", "patch"],
        }
    ]


@pytest.mark.parametrize("values", SELF_MANAGED.values(), ids=SELF_MANAGED)
def test_what_it_is_told_to_manage_is_there(values: dict[str, Any]) -> None:
    objects = render(values)
    managed = managed_by(objects)
    assert managed is not None
    assert managed.namespace == NAMESPACE
    assert of_kind(objects, "Service")["metadata"]["name"] == managed.service
    assert of_kind(objects, "MutatingWebhookConfiguration")["metadata"]["name"] == managed.configuration
    # Empty: whatever the chart put in there, an upgrade would put back.
    assert set(of_kind(objects, "Secret", managed.secret)) == {"apiVersion", "kind", "metadata", "type"}


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_rights_are_bound_to_the_account_that_the_pods_have(values: dict[str, Any]) -> None:
    objects = render(values)
    account = of_kind(objects, "ServiceAccount")["metadata"]["name"]
    assert webhook_pod(objects)["spec"]["serviceAccountName"] == account
    for binding in (one for one in objects if one["kind"].endswith("RoleBinding")):
        name = binding["metadata"]["name"]
        if name.endswith("-cluster-events"):
            continue  # of agents, for test_cluster_events
        role = of_kind(objects, binding["kind"].removesuffix("Binding"), name)
        assert binding["roleRef"]["kind"] == role["kind"]
        assert binding["roleRef"]["name"] == name
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}]


@pytest.mark.parametrize("values", CERT_MANAGER.values(), ids=CERT_MANAGER)
def test_with_cert_manager_it_has_no_rights_no_token_and_no_way_out(values: dict[str, Any]) -> None:
    objects = render(values)
    assert managed_by(objects) is None
    assert not {"Role", "ClusterRole", "Secret"} & {one["kind"] for one in objects}
    assert webhook_pod(objects)["spec"]["automountServiceAccountToken"] is False
    assert of_kind(objects, "NetworkPolicy")["spec"]["egress"] == []


def test_its_network_is_open_for_reviews_for_metrics_and_to_the_api_server() -> None:
    spec = of_kind(render(), "NetworkPolicy")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["ingress"] == [
        {"ports": [{"port": "https", "protocol": "TCP"}]},
        {"ports": [{"port": "http", "protocol": "TCP"}]},
    ]
    (egress,) = spec["egress"]
    assert {port["port"] for port in egress["ports"]} == {443, 6443, 8443, 16443}


def test_values_say_who_may_scrape_and_where_the_api_server_is() -> None:
    values = MATRIX["on the nodes' network, by other ports"]
    spec = of_kind(render(values), "NetworkPolicy")["spec"]
    assert spec["ingress"][1]["from"] == values["networkPolicy"]["metricsFrom"]
    assert spec["egress"] == [{"ports": [{"port": 6443, "protocol": "TCP"}]}]
    assert not [one for one in render({"networkPolicy": {"enabled": False}}) if one["kind"] == "NetworkPolicy"]


@pytest.mark.parametrize("values", CERT_MANAGER.values(), ids=CERT_MANAGER)
def test_cert_managers_certificate_is_of_the_service_and_in_the_secret_that_is_mounted(values: dict[str, Any]) -> None:
    objects = render(values)
    certificate = of_kind(objects, "Certificate", "keepstep-webhook")["spec"]
    asked = of_kind(objects, "MutatingWebhookConfiguration")["webhooks"][0]["clientConfig"]["service"]
    assert certificate["dnsNames"] == [f"{asked['name']}.{asked['namespace']}.svc"]
    (volume,) = webhook_pod(objects)["spec"]["volumes"]
    assert volume["secret"]["secretName"] == certificate["secretName"]


def test_cert_managers_own_ca_stays_while_leaves_change() -> None:
    """A new leaf is served a minute before every replica has read it: whatever is served, its CA must be published."""
    objects = render({"certManager": {"enabled": True}})
    authority = of_kind(objects, "Certificate", "keepstep-webhook-ca")["spec"]
    leaf = of_kind(objects, "Certificate", "keepstep-webhook")["spec"]
    issuer = of_kind(objects, "Issuer", leaf["issuerRef"]["name"])["spec"]
    assert issuer["ca"]["secretName"] == authority["secretName"]
    assert authority["isCA"]
    assert authority["privateKey"]["rotationPolicy"] == "Never"
    assert of_kind(objects, "Issuer", authority["issuerRef"]["name"])["spec"] == {"selfSigned": {}}


def test_somebodys_issuer_is_used_as_it_is_named() -> None:
    values = MATRIX["cert-manager with somebody's issuer"]
    objects = render(values)
    assert not [one for one in objects if one["kind"] == "Issuer"]
    assert of_kind(objects, "Certificate")["spec"]["issuerRef"] == values["certManager"]["issuerRef"]
