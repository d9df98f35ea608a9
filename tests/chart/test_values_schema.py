"""Values that make no sense are refused before anything is installed, and what people do with charts is not."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.chart.annotation_names import SCHEMA, for_every_pod, schema
from tests.chart.rendering import (
    CHART,
    HelmError,
    arguments_in,
    certificate_pods,
    objects_in,
    render,
    template,
    webhook_pod,
    with_image,
)
from tests.chart.values_table import values

NONSENSE = {
    "no webhook at all": ("replicas", 0),
    "a number as a text": ("replicas", "2"),
    "a key that there is not": ("replica", 2),
    "a key with a wrong letter": ("webhook", "failurepolicy", "Fail"),
    "a policy that there is not": ("webhook", "failurePolicy", "fail"),
    "longer than the API server waits": ("webhook", "timeoutSeconds", 31),
    "seconds with a unit": ("webhook", "timeoutSeconds", "5s"),
    "one for a list": ("webhook", "excludedNamespaces", "kube-public"),
    "no namespace's name": ("webhook", "excludedNamespaces", ["Kube"]),
    "labels that are in no selector": ("webhook", "namespaceSelector", {"team": "a"}),
    "a tag in the repository": ("image", "repository", "keepstep:1.0"),
    "a URL for an image": ("image", "repository", "https://a.example/keepstep"),
    "a tag that YAML took for a number": ("image", "tag", 1.0),
    "no tag": ("image", "tag", "a b"),
    "half a digest": ("image", "digest", "sha256:123"),
    "no pull policy": ("image", "pullPolicy", "always"),
    "a name where a reference is wanted": ("image", "pullSecrets", ["mirror"]),
    "a quarter of a byte": ("injection", "memory", "256m"),
    "less than the agent needs": ("injection", "memory", "127Mi"),
    "memory without a unit": ("injection", "memory", 268435456),
    "memory for CPU": ("injection", "cpu", "500Mi"),
    "no CPU": ("injection", "cpu", 0),
    "no grace": ("injection", "graceSeconds", 0),
    "yes is not true": ("injection", "openshift", "yes"),
    "no annotation of ours": ("injection", "annotations", "keepstep.dev/endpoint", "https://a.example"),
    "an annotation that is no text": ("injection", "annotations", "keepstep.dev/keep-last", 3),
    "one run's prefix for all": ("injection", "annotations", "keepstep.dev/destination", "s3://a/b"),
    "yes is no switch": ("admissionPolicies", "enabled", "yes"),
    "one account for many": ("clusterEvents", "serviceAccounts", {"research": "trainer"}),
    "a namespace with nobody": ("clusterEvents", "serviceAccounts", "research", []),
    "a namespace within a name": ("clusterEvents", "serviceAccounts", "research", ["research:trainer"]),
    "a console of a directory": ("console", "destination", "file:///mnt/runs"),
    "a console of a bucket without a scheme": ("console", "destination", "bucket/runs"),
    "keys where their Secret's name is wanted": ("console", "credentials", "AKIA/secret"),
    "a header with a colon": ("console", "userHeader", "X-User:"),
    "a proxy by its name": ("console", "trustedProxies", ["proxy.example"]),
    "seconds without a unit": ("console", "refreshEvery", "30"),
    "anybody may reach it": ("console", "allowedFrom", [{}]),
    "no way to the store": ("console", "storePorts", []),
    "an issuer of no kind": ("certManager", "issuerRef", {"name": "ca"}),
    "a text for a switch": ("certManager", "enabled", "true"),
    "a port that is root's": ("port", 443),
    "no port": ("port", 84430),
    "before it began": ("lameDuckSeconds", -1),
    "resources with a wrong letter": ("resources", "request", {"cpu": 1}),
    "no quantity": ("resources", "limits", "memory", "1 Gi"),
    "no effect of a taint": ("tolerations", [{"key": "a", "effect": "NoSchedul"}]),
    "affinity with a wrong letter": ("affinity", "nodeAffinty", {}),
    "a label that YAML took for a boolean": ("nodeSelector", "gpu", True),
    "no way to the API server": ("networkPolicy", "apiServerPorts", []),
    "a peer that is anybody": ("networkPolicy", "metricsFrom", [{}]),
    "a duration without a unit": ("monitoring", "podMonitors", "interval", "30"),
    "hours for seconds": ("monitoring", "alerts", "recoveryPointAgeSeconds", "1h"),
    "minutes for seconds": ("monitoring", "alerts", "stepAgeSeconds", "30m"),
    "no name": ("fullnameOverride", "My_Name"),
}
"""A path into the values, and what stands there."""


def at(path: list[str], value: Any) -> dict[str, Any]:
    """Values that have it there, and nothing else."""
    for key in reversed(path):
        value = {key: value}
    return dict(value)


@pytest.mark.parametrize("case", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_refused_and_named(case: tuple[Any, ...]) -> None:
    *path, value = case
    with pytest.raises(HelmError, match=rf"(?s)don't meet the specifications of the schema.*{re.escape(path[-1])}"):
        render(at(path, value))


SECTIONS = sorted({"", *(value.path.rpartition(".")[0] for value in values()), "monitoring"})


@pytest.mark.parametrize("section", SECTIONS)
def test_a_key_that_there_is_not_is_refused_wherever_it_stands(section: str) -> None:
    path = [*filter(None, section.split(".")), "nowhere"]
    with pytest.raises(HelmError, match="Additional property nowhere is not allowed"):
        render(at(path, 1))


def test_every_value_is_in_the_schema() -> None:
    """By rendering with the values' own file once more, which would be refused."""
    assert render(yaml.safe_load((CHART / "values.yaml").read_text()) | {"image": {"repository": "a.example/b"}})


def test_annotations_for_all_pods_are_those_that_can_be_for_all() -> None:
    assert SCHEMA.read_text() == schema(), "hint: make pages"
    allowed = json.loads(schema())["properties"]["injection"]["properties"]["annotations"]["propertyNames"]["enum"]
    assert allowed == for_every_pod()


def test_a_limit_can_be_taken_away() -> None:
    (container,) = webhook_pod(render({"resources": {"limits": None}}))["spec"]["containers"]
    assert container["resources"] == {"requests": {"cpu": "100m", "memory": "128Mi"}}


def test_the_chart_can_be_a_part_of_another_with_a_condition_and_globals(tmp_path: Path) -> None:
    """Helm then gives it two values that are not its own."""
    dependency = {"name": "keepstep", "version": "0.1.0", "repository": "", "condition": "keepstep.enabled"}
    chart = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": [dependency]}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(chart))
    (tmp_path / "charts").mkdir()
    (tmp_path / "charts" / "keepstep").symlink_to(CHART)
    values = {"global": {"domain": "a.example"}, "keepstep": {"enabled": True, **with_image({"replicas": 3})}}
    objects = objects_in(template(values, chart=tmp_path, release="platform"))
    assert all("--configuration=platform-keepstep" in arguments_in(pod) for pod in certificate_pods(objects))
    assert "Deployment" not in template({"keepstep": {"enabled": False}}, chart=tmp_path, release="platform")
