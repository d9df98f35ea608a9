"""What a real agent tells an API server of its checkpoints, and that it works as well where nobody listens."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.fakes.fake_api_server import FakeApiServer, Mood
from tests.fakes.object_shelf import RefusedError
from tests.harness.agent_process import AgentProcess, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.servers.server import Bucket
from tests.servers.tls import Certificate

from keepstep_api.v1 import agent_pb2

KEY = "keepstep.dev/last-committed"


@pytest.fixture
def server(certificate: Certificate) -> Iterator[FakeApiServer]:
    with FakeApiServer(namespace="ml", certificate=certificate) as server:
        server.shelf.create("pods", {"metadata": {"name": "trainer-0"}})
        yield server


@pytest.fixture
def agent(tmp_path: Path, rclone_bucket: Bucket, server: FakeApiServer) -> Iterator[AgentProcess]:
    with agent_in_a_pod(tmp_path, rclone_bucket, server) as agent:
        yield agent


@pytest.fixture
def agent_without_kubernetes(tmp_path: Path, rclone_bucket: Bucket, server: FakeApiServer) -> Iterator[AgentProcess]:
    """As it is installed without the extra: a package of that name that is found first has nothing in it."""
    path = packages_with(tmp_path, "")
    with agent_in_a_pod(tmp_path, rclone_bucket, server, PYTHONPATH=path) as agent:
        yield agent


def packages_with(folder: Path, text: str) -> str:
    """A PYTHONPATH on which `kubernetes` is this."""
    package = folder / "packages" / "kubernetes"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(text)
    return os.pathsep.join(filter(None, (str(package.parent), os.environ.get("PYTHONPATH"))))


def agent_in_a_pod(folder: Path, bucket: Bucket, server: FakeApiServer, **environment: str) -> AgentProcess:
    address = urlsplit(server.url)
    # As kubelet and the downward API give them.
    environment |= {
        "POD_NAME": "trainer-0",
        "POD_NAMESPACE": "ml",
        "POD_UID": "a-uid",
        "KUBERNETES_SERVICE_HOST": str(address.hostname),
        "KUBERNETES_SERVICE_PORT": str(address.port),
    }
    return AgentProcess(
        folder / "volume",
        bucket.destination,
        environment=environment,
        endpoint_url=bucket.endpoint_url,
        watch="off",
        cluster_events=True,
        service_account_directory=server.service_account(folder / "account"),
    )


def save(agent: AgentProcess, step: int, kind: agent_pb2.Kind) -> None:
    directory = write_checkpoint(agent.checkpoints / f"checkpoint-{step}", {"model.safetensors": 1000})
    agent.wait_committed(agent.announce(directory, step, kind=kind).save)


def annotations(server: FakeApiServer) -> dict[str, Any]:
    found: dict[str, Any] = server.shelf.get("pods", "trainer-0")["metadata"].get("annotations", {})
    return found


def asked(server: FakeApiServer) -> list[tuple[str, str, int]]:
    return [(one.verb, one.resource, one.status) for one in server.asked]


def test_a_just_in_time_save_is_an_event_and_the_pods_annotation(agent: AgentProcess, server: FakeApiServer) -> None:
    save(agent, 10, agent_pb2.KIND_JUST_IN_TIME)
    wait_until(lambda: KEY in annotations(server), HANG_SECONDS, "the pod is annotated")
    assert json.loads(annotations(server)[KEY])["step"] == 10
    assert asked(server) == [("create", "events", 200), ("patch", "pods", 200)]


def test_what_was_not_told_yet_is_told_at_the_end(agent: AgentProcess, server: FakeApiServer) -> None:
    save(agent, 10, agent_pb2.KIND_PERIODIC)
    wait_until(lambda: KEY in annotations(server), HANG_SECONDS, "the pod is annotated")
    # Within the half minute in which the annotation stays as it is.
    save(agent, 20, agent_pb2.KIND_PERIODIC)
    agent.terminate()
    assert agent.wait(HANG_SECONDS) == 0
    assert json.loads(annotations(server)[KEY])["step"] == 20


def test_without_the_right_it_is_said_once_and_checkpoints_are_committed(
    agent: AgentProcess, server: FakeApiServer
) -> None:
    server.allowed = lambda _verb, _resource, _name: False
    for step in (10, 20, 30):
        save(agent, step, agent_pb2.KIND_JUST_IN_TIME)
    wait_until(lambda: len(agent.log("kubernetes.forbidden")) == 2, HANG_SECONDS, "both are left out")
    agent.terminate()
    assert agent.wait(HANG_SECONDS) == 0
    assert [status for _, _, status in asked(server)] == [403, 403]
    with pytest.raises(RefusedError):
        server.shelf.get("events", "any")


@pytest.mark.parametrize("mood", [Mood.DEAF, Mood.BROKEN])
def test_an_api_server_in_trouble_holds_up_neither_commits_nor_the_end(
    agent: AgentProcess, server: FakeApiServer, mood: Mood
) -> None:
    server.mood = mood
    for step in (10, 20, 30):
        save(agent, step, agent_pb2.KIND_JUST_IN_TIME)
    agent.terminate()
    assert agent.wait(HANG_SECONDS) == 0
    assert len(agent.log("checkpoint.committed")) == 3


def test_a_trainer_that_saves_where_the_agent_cannot_look_is_an_event(
    agent: AgentProcess, server: FakeApiServer
) -> None:
    for _ in range(2):
        with agent.stub() as stub:
            stub.Register(agent_pb2.RegisterRequest(unprotected_directory="/data/out"), timeout=HANG_SECONDS)
    wait_until(lambda: bool(server.shelf.selected("events")), HANG_SECONDS, "the event is there")
    agent.terminate()
    assert agent.wait(HANG_SECONDS) == 0
    (event,) = server.shelf.selected("events")
    assert (event["reason"], event["type"]) == ("OutputNotStored", "Warning")
    assert "keepstep.dev/output: /data/out" in event["message"]


def test_an_agent_with_cluster_events_stays_small(agent: AgentProcess, server: FakeApiServer) -> None:
    save(agent, 10, agent_pb2.KIND_JUST_IN_TIME)
    wait_until(lambda: KEY in annotations(server), HANG_SECONDS, "the pod is annotated")
    assert agent.memory_bytes("VmHWM") <= 160 * 1024**2


def test_an_agent_without_cluster_events_does_not_load_the_client_of_kubernetes(
    tmp_path: Path, rclone_bucket: Bucket
) -> None:
    note = tmp_path / "loaded"
    path = packages_with(tmp_path, f"open({str(note)!r}, 'w').close()")
    with AgentProcess(
        tmp_path / "volume",
        rclone_bucket.destination,
        environment={"PYTHONPATH": path},
        endpoint_url=rclone_bucket.endpoint_url,
        watch="off",
    ) as agent:
        save(agent, 10, agent_pb2.KIND_JUST_IN_TIME)
        agent.terminate()
        assert agent.wait(HANG_SECONDS) == 0
    assert not note.exists()


def test_without_the_client_of_kubernetes_it_says_at_its_start_what_to_install_and_goes_on(
    agent_without_kubernetes: AgentProcess,
) -> None:
    agent = agent_without_kubernetes
    wait_until(lambda: bool(agent.log("outbox.not_taken")), HANG_SECONDS, "it is said")
    (line,) = agent.log("outbox.not_taken")
    assert line["to"] == "kubernetes"
    assert "keepstep-agent[kubernetes]" in line["hint"]
    save(agent, 10, agent_pb2.KIND_PERIODIC)
