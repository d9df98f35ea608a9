"""Alerts, dashboard and scraping speak of metrics, labels and ports that there are."""

import json
import re
from collections.abc import Iterator

import jsonpatch
import promql_parser
import pytest
from tests.chart.known_metrics import FROM_SCRAPES, agents_metrics, webhooks_metrics
from tests.chart.rendering import Object, of_kind, render, webhook_pod
from tests.chart.values_matrix import MATRIX
from tests.harness.webhook_process import training_pod

from keepstep_agent.core.errors import PASSING, RETRYABLE, ErrorKind
from keepstep_agent.core.injection.annotations import read_annotations
from keepstep_agent.core.injection.mutation import mutate
from keepstep_agent.core.injection.spec import Injection, InjectionDefaults, Mutation
from keepstep_api import names

VALUES = MATRIX["everything watched"]
KNOWN = agents_metrics() | webhooks_metrics()
OF_GRAFANA = {"$__rate_interval": "5m", "$namespace": "research", "$pod": "train-0"}


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return render(VALUES)


def alerts(objects: list[Object]) -> dict[str, Object]:
    groups = of_kind(objects, "PrometheusRule")["spec"]["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def panels(objects: list[Object]) -> list[Object]:
    found: list[Object] = json.loads(of_kind(objects, "ConfigMap")["data"]["keepstep.json"])["panels"]
    return found


def queries(objects: list[Object]) -> Iterator[tuple[str, str]]:
    for name, rule in alerts(objects).items():
        yield name, rule["expr"]
    for panel in panels(objects):
        for target in panel.get("targets", []):
            query = target["expr"]
            for variable, value in OF_GRAFANA.items():
                query = query.replace(variable, value)
            yield panel["title"], query


def selectors(query: str) -> list[promql_parser.VectorSelector]:
    found: list[promql_parser.VectorSelector] = []

    def visit(part: promql_parser.Expr) -> bool:
        if isinstance(part, promql_parser.VectorSelector):
            found.append(part)
        return True

    promql_parser.walk(promql_parser.parse(query), visit)
    return found


def injected_ports() -> set[str]:
    """Names of the ports that the agent's container gets."""
    pod, defaults = training_pod(), InjectionDefaults(image="registry.example/keepstep:1")
    asked = read_annotations(pod["metadata"]["annotations"], defaults)
    assert isinstance(asked, Injection)
    mutation = mutate(pod, asked, defaults)
    assert isinstance(mutation, Mutation)
    changed = jsonpatch.apply_patch(pod, list(mutation.patch))
    return {port["name"] for port in changed["spec"]["initContainers"][-1]["ports"]}


def test_every_query_is_of_metrics_and_labels_that_there_are(objects: list[Object]) -> None:
    asked = set()
    for where, query in queries(objects):
        of_query = selectors(query)
        assert of_query, where
        for selector in of_query:
            assert selector.name in KNOWN, where
            asked.add(selector.name)
            labels = KNOWN[selector.name]
            for matcher in selector.matchers.matchers:
                if matcher.name not in FROM_SCRAPES:
                    assert set(matcher.value.split("|")) <= labels[matcher.name], (where, matcher.name)
        grouped = {label.strip() for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(",")}
        assert grouped <= FROM_SCRAPES.union(*(KNOWN[selector.name] for selector in of_query if selector.name)), where
    # Nothing that is told is told in vain; a histogram's sums stand beside its buckets.
    unseen = {name for name in set(KNOWN) - asked if not name.endswith(("_created", "_count", "_sum"))}
    assert unseen == set()


def test_every_error_of_an_upload_that_does_not_end_leads_to_an_alert(objects: list[Object]) -> None:
    def kinds(name: str) -> set[str]:
        (selector,) = selectors(alerts(objects)[name]["expr"])
        (matcher,) = selector.matchers.matchers
        return set(matcher.value.split("|"))

    begun_anew = {ErrorKind.UPLOAD_LOST, ErrorKind.ALREADY_EXISTS}
    assert kinds("KeepstepStoreFails") == {kind.value for kind in PASSING | begun_anew}
    assert kinds("KeepstepUploadsBlocked") == {kind.value for kind in RETRYABLE - PASSING - begun_anew}


def test_the_age_that_somebody_wants_to_know_of_is_a_value(objects: list[Object]) -> None:
    assert alerts(objects)["KeepstepRecoveryPointOld"]["expr"].endswith("> 1800")
    assert alerts(objects)["KeepstepNothingCommitted"]["for"] == "1800s"


def test_panels_do_not_overlap_and_say_what_they_are_of(objects: list[Object]) -> None:
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in panels(objects)]
    assert len(ids) == len(set(ids))
    for panel in panels(objects):
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert panel["fieldConfig"]["defaults"]["unit"]


def test_the_dashboards_variables_are_of_a_metric_that_every_agent_has(objects: list[Object]) -> None:
    dashboard = json.loads(of_kind(objects, "ConfigMap")["data"]["keepstep.json"])
    variables = {one["name"]: one for one in dashboard["templating"]["list"]}
    assert set(variables) == {"datasource", "namespace", "pod"}
    for name in ("namespace", "pod"):
        query = variables[name]["query"]["query"]
        metric, label = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert (metric in KNOWN, label) == (True, name)


def test_agents_and_webhooks_are_scraped_at_the_ports_that_they_have(objects: list[Object]) -> None:
    webhook = of_kind(objects, "PodMonitor", "keepstep-webhook")["spec"]
    labels = webhook_pod(objects)["metadata"]["labels"]
    assert webhook["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = webhook["podMetricsEndpoints"]
    (container,) = webhook_pod(objects)["spec"]["containers"]
    assert endpoint["port"] in {port["name"] for port in container["ports"]}
    assert endpoint["interval"] == "30s"


def test_agents_are_found_in_all_namespaces_by_what_the_injection_writes(objects: list[Object]) -> None:
    agents = of_kind(objects, "PodMonitor", "keepstep-agents")["spec"]
    assert agents["namespaceSelector"] == {"any": True}
    (endpoint,) = agents["podMetricsEndpoints"]
    assert endpoint["port"] in injected_ports()
    (relabeling,) = endpoint["relabelings"]
    written = re.sub(r"[^a-zA-Z0-9_]", "_", names.ANNOTATION_INJECTED)
    assert relabeling == {
        "sourceLabels": [f"__meta_kubernetes_pod_annotationpresent_{written}"],
        "action": "keep",
        "regex": "true",
    }


def test_labels_by_which_others_select_are_values(objects: list[Object]) -> None:
    for kind in ("PodMonitor", "PrometheusRule"):
        for one in objects:
            if one["kind"] == kind:
                assert one["metadata"]["labels"]["release"] == "prometheus"
    config_map = of_kind(objects, "ConfigMap")["metadata"]
    assert config_map["labels"]["grafana_dashboard"] == "1"
    assert config_map["annotations"] == {"grafana_folder": "Training"}


def test_nothing_of_it_is_there_unless_it_is_asked_for() -> None:
    assert not {"PodMonitor", "PrometheusRule", "ConfigMap"} & {one["kind"] for one in render()}
