"""The webhook's pods: started with flags that it has, of the objects that are rendered beside it, with no power."""

from typing import Any

import pytest
from tests.chart.rendering import NAMESPACE, Object, arguments_of, certificate_pods, of_kind, render, webhook_pod
from tests.chart.values_matrix import MATRIX

from keepstep_agent.cli.webhook import _settings, webhook
from keepstep_agent.webhook.settings import FINISH_SECONDS, WebhookSettings

WITH_DEFAULTS_OF_THE_PROGRAM = {"log_format"}


def settings_of(objects: list[Object]) -> WebhookSettings:
    """As the real command line understands the flags. Raises what an admin would be told."""
    command, *flags = arguments_of(objects)
    assert command == webhook.name
    return _settings(webhook.make_context(command, flags).params)


def container_of(pod: Object) -> Object:
    (container,) = pod["spec"]["containers"]
    return dict(container)


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_the_webhook_takes_all_flags_that_it_is_started_with(values: dict[str, Any]) -> None:
    objects = render(values)
    told = settings_of(objects)
    container = container_of(webhook_pod(objects))
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert told.defaults.image == container["image"]
    assert told.listen == ("", ports["https"])
    assert told.http_listen == ("", ports["http"])
    (mount,) = container["volumeMounts"]
    assert str(told.certificates) == mount["mountPath"]
    webhook = of_kind(objects, "MutatingWebhookConfiguration")["webhooks"][0]
    assert told.failure_policy == webhook["failurePolicy"]
    assert told.read_seconds == webhook["timeoutSeconds"]


def test_every_flag_of_the_webhook_is_the_charts_to_set() -> None:
    """But for those that nobody has wanted to change: a flag that is new gets a value, or a line here."""
    passed = set()
    for values in MATRIX.values():
        passed |= {flag.split("=")[0] for flag in arguments_of(render(values))[1:]}
    options = {option.name: set(option.opts) for option in webhook.params}
    assert {name for name, flags in options.items() if not flags & passed} == WITH_DEFAULTS_OF_THE_PROGRAM


def test_values_for_all_injections_reach_the_webhook() -> None:
    values = MATRIX["an own store for everybody"]
    told = settings_of(render(values)).defaults
    assert (told.grace_seconds, told.cpu, told.memory, told.openshift) == (600, "2", "1Gi", True)
    assert told.annotations == values["injection"]["annotations"]


def test_openshift_is_known_by_its_api_unless_values_say_otherwise() -> None:
    there = ("--api-versions", "security.openshift.io/v1")
    assert not settings_of(render({})).defaults.openshift
    assert settings_of(render({}, *there)).defaults.openshift
    assert not settings_of(render({"injection": {"openshift": False}}, *there)).defaults.openshift


def test_every_label_that_is_selected_is_the_pods_whatever_labels_are_added() -> None:
    objects = render(MATRIX["placed with care"])
    labels = webhook_pod(objects)["metadata"]["labels"]
    assert labels["team"] == "platform"
    spread = webhook_pod(objects)["spec"]["topologySpreadConstraints"]
    for selector in [
        of_kind(objects, "Deployment")["spec"]["selector"]["matchLabels"],
        of_kind(objects, "Service")["spec"]["selector"],
        of_kind(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        of_kind(objects, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        *(one["labelSelector"]["matchLabels"] for one in spread),
    ]:
        assert selector.items() <= labels.items()
        # What `helm test` starts is no webhook, and a Job is none.
        for other in [of_kind(objects, "Pod"), *certificate_pods(objects)]:
            assert not selector.items() <= other["metadata"]["labels"].items()


def test_the_api_server_finds_the_webhook_by_its_service() -> None:
    for values in MATRIX.values():
        objects = render(values)
        service = of_kind(objects, "Service")
        (port,) = service["spec"]["ports"]
        asked = of_kind(objects, "MutatingWebhookConfiguration")["webhooks"][0]["clientConfig"]["service"]
        named = {"name": service["metadata"]["name"], "namespace": NAMESPACE, "port": port["port"], "path": "/mutate"}
        assert asked == named
        assert port["targetPort"] in {one["name"] for one in container_of(webhook_pod(objects))["ports"]}


def test_what_has_begun_is_answered_before_the_pod_is_killed() -> None:
    for values in MATRIX.values():
        objects = render(values)
        grace_seconds = webhook_pod(objects)["spec"]["terminationGracePeriodSeconds"]
        # Each of two ports is given its time to finish.
        assert grace_seconds > settings_of(objects).lame_duck_seconds + 2 * FINISH_SECONDS


def test_probes_ask_the_port_without_tls() -> None:
    container = container_of(webhook_pod(render()))
    paths = {name: container[name]["httpGet"] for name in ("readinessProbe", "livenessProbe")}
    assert paths == {
        "readinessProbe": {"path": "/readyz", "port": "http"},
        "livenessProbe": {"path": "/healthz", "port": "http"},
    }


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_pods_are_restricted_as_pod_security_has_it(values: dict[str, Any]) -> None:
    objects = render(values)
    for pod in [webhook_pod(objects), of_kind(objects, "Pod"), *certificate_pods(objects)]:
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        # A user of ours would be refused on OpenShift, which gives one.
        assert "runAsUser" not in spec["securityContext"]
        assert container_of(pod)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {kind for volume in spec.get("volumes", ()) for kind in volume if kind != "name"} <= {"secret"}
    assert webhook_pod(objects)["spec"].get("hostNetwork", False) == values.get("hostNetwork", False)


def test_two_webhooks_stand_apart_and_one_may_go_at_a_time() -> None:
    objects = render()
    deployment = of_kind(objects, "Deployment")["spec"]
    assert deployment["replicas"] == 2
    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    topologies = [one["topologyKey"] for one in deployment["template"]["spec"]["topologySpreadConstraints"]]
    assert topologies == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    assert of_kind(objects, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def test_on_the_nodes_network_a_new_one_need_not_wait_for_a_port_for_ever() -> None:
    deployment = of_kind(render({"hostNetwork": True}), "Deployment")["spec"]
    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert deployment["template"]["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"


def test_placement_is_as_values_say() -> None:
    values = MATRIX["placed with care"]
    spec = webhook_pod(render(values))["spec"]
    for pod in certificate_pods(render(values)):
        for name in ("priorityClassName", "tolerations", "nodeSelector"):
            assert pod["spec"][name] == spec[name]
        assert pod["metadata"]["annotations"] == values["podAnnotations"]
    for name in ("priorityClassName", "tolerations", "affinity"):
        assert spec[name] == values[name]
    assert spec["nodeSelector"] == {"kubernetes.io/os": "linux", **values["nodeSelector"]}
    assert container_of(webhook_pod(render(values)))["resources"] == values["resources"]
