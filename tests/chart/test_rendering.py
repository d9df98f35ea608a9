"""Whatever people install the chart with, Helm finds nothing to say and every API server takes what is rendered."""

import functools
import json
import re
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.chart.custom_resources import is_custom, validate
from tests.chart.rendering import (
    CHART,
    NAMESPACE,
    VERSION,
    HelmError,
    Object,
    arguments_of,
    helm,
    of_kind,
    render,
    template,
    webhook_pod,
    with_image,
)
from tests.chart.values_matrix import MATRIX

import keepstep_agent

VERSIONS = [f"1.{minor}" for minor in range(29, 38)]


@functools.cache
def rendered(version: str = VERSION) -> dict[str, Object]:
    """Every object of the whole matrix once, by what it is and where it comes from."""
    found: dict[str, str] = {}
    for case, values in MATRIX.items():
        for one in render(values, "--kube-version", version):
            found.setdefault(json.dumps(one), f"{one['kind']} {one['metadata']['name']}, {case}")
    return {where: json.loads(text) for text, where in found.items()}


@pytest.fixture
def _schemas_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package reads two files, one of a megabyte, for every object."""
    read = kubernetes_validate.utils.schema_contents
    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", functools.cache(read))


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_lint_is_strict_and_has_nothing_to_say(values: dict[str, Any]) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART), values=with_image(values))


@pytest.mark.usefixtures("_schemas_read_once")
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_for_every_kubernetes(version: str) -> None:
    # From 1.30 on the same is rendered for all.
    for where, one in rendered(VERSIONS[0] if version == VERSIONS[0] else VERSION).items():
        if not is_custom(one):
            try:
                kubernetes_validate.validate(one, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                pytest.fail(f"{where}: {error.message}")


def test_every_object_of_other_projects_has_the_fields_of_their_references() -> None:
    custom = [one for one in rendered().values() if is_custom(one)]
    assert {one["kind"] for one in custom} == {"Issuer", "Certificate", "PodMonitor", "PrometheusRule"}
    for one in custom:
        validate(one)


def test_no_version_that_can_be_checked_is_left_out() -> None:
    assert kubernetes_validate.latest_version().startswith(f"{VERSIONS[-1]}.")


def test_kubernetes_before_sidecars_is_refused() -> None:
    with pytest.raises(HelmError, match=r"requires kubeVersion: >=1\.29"):
        render({}, "--kube-version", "1.28.15")
    # As managed clusters call theirs.
    assert render({}, "--kube-version", "v1.29.15-eks-1234567")


def test_rendered_twice_it_is_the_same() -> None:
    for values in MATRIX.values():
        assert template(with_image(values)) == template(with_image(values))


def test_no_template_makes_anything_up() -> None:
    """What changes at every render never ends to be applied, where Git is what is applied."""
    for file in CHART.glob("templates/**/*"):
        if file.is_file():
            without_texts = re.sub(r'`[^`]*`|"[^"]*"', "", file.read_text())
            calls = " ".join(re.findall(r"\{\{.*?\}\}", without_texts))
            assert re.findall(r"\b(gen[A-Z]\w*|rand\w+|uuidv4|now|lookup|htpasswd|derivePassword)\b", calls) == [], file


def test_every_object_is_in_the_releases_namespace_or_in_none() -> None:
    everywhere = {"MutatingWebhookConfiguration", "ClusterRole", "ClusterRoleBinding"}
    everywhere |= {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    for where, one in rendered().items():
        expected = None if one["kind"] in everywhere else NAMESPACE
        if one["kind"] == "RoleBinding" and one["roleRef"]["kind"] == "ClusterRole":
            continue  # it counts in the namespace that it is in, which values name
        assert one["metadata"].get("namespace") == expected, where


@pytest.mark.parametrize(
    "release", ["keepstep", "training", "of.a.team", "as-long-as-helm-allows-a-name-of-a-release-to-be-0053"]
)
def test_names_are_valid_whatever_the_release_is_called(release: str) -> None:
    values = MATRIX["everything watched"] | {"certManager": {"enabled": True}}
    for one in [*render(values, release=release), *render({}, release=release)]:
        # A label of DNS, which a Service's name must be: the strictest that any kind wants.
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", one["metadata"]["name"])


def test_the_image_is_named_by_digest_else_by_tag_else_by_the_charts_version() -> None:
    digest = "sha256:" + "a" * 64
    for values, expected in [
        ({}, f"registry.example/keepstep:{keepstep_agent.__version__}"),
        ({"tag": "nightly"}, "registry.example/keepstep:nightly"),
        ({"tag": "nightly", "digest": digest}, f"registry.example/keepstep@{digest}"),
    ]:
        objects = render({"image": values})
        assert [one["image"] for one in webhook_pod(objects)["spec"]["containers"]] == [expected]
        assert f"--image={expected}" in arguments_of(objects)
        assert of_kind(objects, "Pod")["spec"]["containers"][0]["image"] == expected


def test_without_an_image_helm_says_what_to_give() -> None:
    with pytest.raises(HelmError, match=r"image\.repository is missing; hint: "):
        template({})


def test_one_port_for_two_things_is_refused() -> None:
    with pytest.raises(HelmError, match="port and httpPort are the same"):
        render({"port": 9443, "httpPort": 9443})


def test_the_chart_has_the_version_of_the_program() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == keepstep_agent.__version__
