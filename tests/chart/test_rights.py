"""What webhook and Jobs may do in the cluster and on the network: what certificates need, by name, and nothing else."""

from typing import Any

import pytest
from tests.chart.rendering import (
    NAMESPACE,
    HelmError,
    Object,
    arguments_in,
    certificate_pods,
    of_kind,
    render,
    webhook_pod,
)
from tests.chart.values_matrix import MATRIX

from keepstep_agent.cli.webhook import certificates
from keepstep_agent.webhook.settings import CertificateSettings

SELF_MANAGED = {case: values for case, values in MATRIX.items() if not values.get("certManager", {}).get("enabled")}
CERT_MANAGER = {case: values for case, values in MATRIX.items() if case not in SELF_MANAGED}


def told(pod: Object) -> CertificateSettings:
    """As `keepstep certificates` understands its flags."""
    command, *flags = arguments_in(pod)
    assert command == certificates.name
    params = certificates.make_context(command, [*flags, "--kubernetes-host=10.0.0.1"]).params
    del params["log_format"]
    return CertificateSettings(**params)


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_the_webhook_has_no_rights_no_token_and_no_way_out(values: dict[str, Any]) -> None:
    objects = render(values)
    account = of_kind(objects, "ServiceAccount")["metadata"]["name"]
    assert webhook_pod(objects)["spec"]["serviceAccountName"] == account
    assert webhook_pod(objects)["spec"]["automountServiceAccountToken"] is False
    bindings = [one for one in objects if one["kind"].endswith("RoleBinding")]
    subjects = [subject for one in bindings for subject in one["subjects"]]
    assert account not in {subject["name"] for subject in subjects if subject.get("namespace") == NAMESPACE}
    if values.get("networkPolicy", {}).get("enabled", True):
        assert of_kind(objects, "NetworkPolicy")["spec"]["egress"] == []


@pytest.mark.parametrize("values", SELF_MANAGED.values(), ids=SELF_MANAGED)
def test_the_jobs_may_read_and_patch_two_objects_by_name(values: dict[str, Any]) -> None:
    objects = render(values)
    for pod in certificate_pods(objects):
        settings = told(pod)
        account = pod["spec"]["serviceAccountName"]
        assert of_kind(objects, "Role", account)["rules"] == [
            {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [settings.secret], "verbs": ["get", "patch"]}
        ]
        assert of_kind(objects, "ClusterRole", account)["rules"] == [
            {
                "apiGroups": ["admissionregistration.k8s.io"],
                "resources": ["mutatingwebhookconfigurations"],
                "resourceNames": [settings.configuration],
                "verbs": ["get", "patch"],
            }
        ]


@pytest.mark.parametrize("values", SELF_MANAGED.values(), ids=SELF_MANAGED)
def test_what_the_jobs_are_told_is_there_and_the_webhook_serves_what_they_write(values: dict[str, Any]) -> None:
    objects = render(values)
    pods = certificate_pods(objects)
    assert len(pods) == 2
    for pod in pods:
        settings = told(pod)
        assert settings.namespace == NAMESPACE
        assert of_kind(objects, "Service")["metadata"]["name"] == settings.service
        assert of_kind(objects, "MutatingWebhookConfiguration")["metadata"]["name"] == settings.configuration
        # Empty: whatever the chart put in there, an upgrade would put back.
        assert set(of_kind(objects, "Secret", settings.secret)) == {"apiVersion", "kind", "metadata", "type"}
        assert served_secret(objects) == settings.secret


def served_secret(objects: list[Object]) -> str:
    """The pod does not start before the two entries are there, and gets no other."""
    (volume,) = webhook_pod(objects)["spec"]["volumes"]
    assert [one["key"] for one in volume["secret"]["items"]] == ["tls.crt", "tls.key"]
    assert not volume["secret"].get("optional")
    return str(volume["secret"]["secretName"])


def test_a_job_has_another_name_when_it_runs_something_else_and_else_the_same() -> None:
    """A Job cannot be changed: `helm upgrade`, `kubectl apply` and Argo CD would fail."""

    def name(values: dict[str, Any]) -> str:
        (job,) = [one for one in render(values) if one["kind"] == "Job"]
        return str(job["metadata"]["name"])

    assert name({}) == name({"replicas": 3})
    # By which it could not reach the API server.
    assert name({}) != name({"networkPolicy": {"apiServerPorts": [16443]}})
    assert name({}) != name({"image": {"tag": "next"}})
    assert name({}) != name({"tolerations": [{"operator": "Exists"}]})


def test_a_job_that_cannot_run_holds_up_no_other() -> None:
    objects = render()
    (job,) = [one["spec"] for one in objects if one["kind"] == "Job"]
    (cron,) = [one["spec"] for one in objects if one["kind"] == "CronJob"]
    assert cron["concurrencyPolicy"] == "Replace"
    assert job["activeDeadlineSeconds"] == cron["jobTemplate"]["spec"]["activeDeadlineSeconds"] == 600


def test_no_object_of_an_installation_is_a_hook() -> None:
    """`helm install --wait` would wait for the webhook before those after it; Argo CD runs them in a way of its own."""
    for values in MATRIX.values():
        hooks = [one["metadata"]["annotations"]["helm.sh/hook"] for one in render(values) if is_hook(one)]
        assert hooks == ["test"]


def is_hook(one: Object) -> bool:
    return "helm.sh/hook" in one["metadata"].get("annotations", {})


def test_values_say_when_the_certificate_is_looked_at() -> None:
    (cron,) = [one for one in render({"certificates": {"schedule": "@daily"}}) if one["kind"] == "CronJob"]
    assert cron["spec"]["schedule"] == "@daily"
    with pytest.raises(HelmError, match="schedule"):
        render({"certificates": {"schedule": "every hour"}})


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_rights_are_bound_to_the_account_that_the_pods_have(values: dict[str, Any]) -> None:
    objects = render(values)
    accounts = {pod["spec"]["serviceAccountName"] for pod in certificate_pods(objects)}
    for binding in (one for one in objects if one["kind"].endswith("RoleBinding")):
        name = binding["metadata"]["name"]
        if name.endswith("-cluster-events"):
            continue  # of agents, for test_cluster_events
        role = of_kind(objects, binding["kind"].removesuffix("Binding"), name)
        assert binding["roleRef"]["kind"] == role["kind"]
        assert binding["roleRef"]["name"] == name
        (account,) = accounts
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}]
        assert of_kind(objects, "ServiceAccount", account)


@pytest.mark.parametrize("values", CERT_MANAGER.values(), ids=CERT_MANAGER)
def test_with_cert_manager_nothing_makes_certificates_and_nobody_has_rights(values: dict[str, Any]) -> None:
    objects = render(values)
    assert not {"Role", "ClusterRole", "Secret", "Job", "CronJob"} & {one["kind"] for one in objects}


def test_the_network_is_open_to_the_webhook_for_reviews_and_metrics_and_from_the_jobs_to_the_api_server() -> None:
    spec = of_kind(render(), "NetworkPolicy")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["ingress"] == [
        {"ports": [{"port": "https", "protocol": "TCP"}]},
        {"ports": [{"port": "http", "protocol": "TCP"}]},
    ]
    spec = of_kind(render(), "NetworkPolicy", "keepstep-certs")["spec"]
    for pod in certificate_pods(render()):
        assert spec["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert spec["ingress"] == []
    (egress,) = spec["egress"]
    assert {port["port"] for port in egress["ports"]} == {443, 6443, 8443, 16443}


def test_values_say_who_may_scrape_and_where_the_api_server_is() -> None:
    values = MATRIX["on the nodes' network, by other ports"]
    spec = of_kind(render(values), "NetworkPolicy")["spec"]
    assert spec["ingress"][1]["from"] == values["networkPolicy"]["metricsFrom"]
    egress = of_kind(render(values), "NetworkPolicy", "keepstep-certs")["spec"]["egress"]
    assert egress == [{"ports": [{"port": 6443, "protocol": "TCP"}]}]
    assert not [one for one in render({"networkPolicy": {"enabled": False}}) if one["kind"] == "NetworkPolicy"]


@pytest.mark.parametrize("values", CERT_MANAGER.values(), ids=CERT_MANAGER)
def test_cert_managers_certificate_is_of_the_service_and_in_the_secret_that_is_mounted(values: dict[str, Any]) -> None:
    objects = render(values)
    certificate = of_kind(objects, "Certificate", "keepstep-webhook")["spec"]
    asked = of_kind(objects, "MutatingWebhookConfiguration")["webhooks"][0]["clientConfig"]["service"]
    assert certificate["dnsNames"] == [f"{asked['name']}.{asked['namespace']}.svc"]
    assert served_secret(objects) == certificate["secretName"]


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
