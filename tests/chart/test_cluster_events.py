"""The rights of agents that tell Kubernetes of their checkpoints: as many as that takes, for whom an admin names."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import yaml
from tests.chart.rendering import Object, of_kind, render
from tests.chart.values_matrix import MATRIX
from tests.fakes.fake_api_server import FakeApiServer
from tests.servers.tls import Certificate

from keepstep_agent.adapters.kubernetes import JOB_LABEL, KubernetesCluster, KueueWorkload
from keepstep_agent.core.settings.values import ClusterSettings
from keepstep_agent.ports import EventType, PodEvent

NAME = "keepstep-cluster-events"
VALUES = MATRIX["events of some trainers"]


def of_agents(objects: list[Object]) -> list[Object]:
    return [one for one in objects if one["metadata"]["name"] == NAME]


def test_nobody_has_them_by_default() -> None:
    assert of_agents(render()) == []


def test_they_are_bound_to_the_named_accounts_each_in_its_own_namespace_alone() -> None:
    objects = of_agents(render(VALUES))
    bindings = [one for one in objects if one["kind"] != "ClusterRole"]
    assert {one["kind"] for one in bindings} == {"RoleBinding"}
    bound = {one["metadata"]["namespace"]: one["subjects"] for one in bindings}
    for namespace, subjects in bound.items():
        assert {(subject["kind"], subject["namespace"]) for subject in subjects} == {("ServiceAccount", namespace)}
    names = {namespace: [subject["name"] for subject in subjects] for namespace, subjects in bound.items()}
    assert names == VALUES["clusterEvents"]["serviceAccounts"]
    for one in bindings:
        assert one["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": NAME}


def test_without_names_the_role_is_there_for_others_to_bind() -> None:
    assert [one["kind"] for one in of_agents(render({"clusterEvents": {"enabled": True}}))] == ["ClusterRole"]


def test_the_guide_binds_the_role_by_the_name_that_it_has() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text()
    blocks = guide.split("```yaml\n")[1:]
    parsed = [yaml.safe_load(block.partition("```")[0]) for block in blocks]
    (binding,) = [one for one in parsed if one.get("kind") == "RoleBinding"]
    assert binding["roleRef"]["name"] == of_kind(render(VALUES), "ClusterRole", NAME)["metadata"]["name"]


async def test_they_are_what_an_agent_does_and_no_more(certificate: Certificate, tmp_path: Path) -> None:
    rules = of_kind(render(VALUES), "ClusterRole", NAME)["rules"]
    granted = {(verb, what) for rule in rules for verb in rule["verbs"] for what in rule["resources"]}
    used: set[tuple[str, str]] = set()

    def allowed(verb: str, resource: str, _name: str) -> bool:
        used.add((verb, resource))
        return (verb, resource) in granted

    with FakeApiServer(namespace="ml", certificate=certificate) as server, ThreadPoolExecutor(1) as executor:
        server.shelf.create("pods", {"metadata": {"name": "trainer-0"}})
        server.shelf.create("workloads", {"metadata": {"name": "job-a", "labels": {JOB_LABEL: "a-uid"}}})
        server.allowed = allowed
        address = urlsplit(server.url)
        settings = ClusterSettings(
            cluster_events=True,
            job_uid="a-uid",
            pod_name="trainer-0",
            kubernetes_host=str(address.hostname),
            kubernetes_port=address.port or 0,
            service_account_directory=str(server.service_account(tmp_path / "account")),
        )
        cluster = KubernetesCluster(settings, executor)
        await cluster.tell(PodEvent(event_type=EventType.WARNING, reason="CheckpointLost", message="lost", at=1e9))
        await cluster.annotate("keepstep.dev/last-committed", "step 1")
        await cluster.close()
        workload = KueueWorkload(settings, executor)
        await workload.boost(-5)
        await workload.close()
    assert used == granted
    groups = {tuple(rule["resources"]): rule["apiGroups"] for rule in rules}
    assert groups == {("events",): [""], ("pods",): [""], ("workloads",): ["kueue.x-k8s.io"]}


def test_nobody_may_change_what_kueue_knows_unless_that_is_wanted() -> None:
    rules = of_kind(render({"clusterEvents": {"enabled": True}}), "ClusterRole", NAME)["rules"]
    assert [rule["resources"] for rule in rules] == [["events"], ["pods"]]
