"""What other programs ask the agent: Prometheus, kubelet's probes, gRPC health and reflection."""

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from tests.harness.agent_process import AgentProcess, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.servers.loopback import needs_ipv6
from tests.servers.process import free_port

from keepstep_agent.core.injection.mutation import mutate
from keepstep_agent.core.injection.spec import Injection, InjectionDefaults, Mutation
from keepstep_api.names import POD_METRICS_PORT

SERVICE = "keepstep.v1.Agent"


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def agent(tmp_path: Path, address: str) -> Iterator[AgentProcess]:
    destination = f"file://{tmp_path}/bucket"
    with AgentProcess(tmp_path / "volume", destination, http_address=address, grace_seconds=77) as agent:
        wait_until(lambda: bool(agent.log("http.serving")), HANG_SECONDS, "the pages are served")
        yield agent


def get(address: str, path: str) -> tuple[int, str]:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=HANG_SECONDS) as answer:
        return answer.status, answer.read().decode()


def metrics(address: str) -> dict[tuple[str, ...], float]:
    """By name, then label values."""
    _, text = get(address, "/metrics")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_tell_what_a_crash_would_cost_before_and_after_a_commit(agent: AgentProcess, address: str) -> None:
    before = metrics(address)
    assert before["keepstep_recovery_point_age_seconds",] == -1
    assert before["keepstep_recovery_point_step",] == -1
    assert before["keepstep_checkpoints_total", "committed"] == 0
    assert before["keepstep_grace_seconds",] == 77

    source = write_checkpoint(agent.checkpoints / "checkpoint-12", {"model.safetensors": 3_000_000})
    agent.wait_committed(agent.announce(source, 12).save)

    after = metrics(address)
    assert 0 <= after["keepstep_recovery_point_age_seconds",] < HANG_SECONDS
    assert after["keepstep_recovery_point_step",] == 12
    assert after["keepstep_backlog_bytes",] == 0
    assert after["keepstep_stored_bytes_total",] == 3_000_000
    assert after["keepstep_checkpoints_total", "committed"] == 1
    assert after["keepstep_checkpoints_total", "failed"] == 0
    assert after["keepstep_terminating",] == 0


def test_metrics_count_what_failed_and_why(agent: AgentProcess, address: str) -> None:
    with pytest.raises(grpc.RpcError):
        agent.announce(agent.checkpoints / "nothing-here", 1, save="attempt-1")
    after = metrics(address)
    assert after["keepstep_checkpoints_total", "failed"] == 1
    assert after["keepstep_work_failures_total", "file-missing"] == 1


def test_the_probes_answer_while_the_agent_serves(agent: AgentProcess, address: str) -> None:
    assert get(address, "/healthz") == (200, "ok\n")
    assert get(address, "/readyz") == (200, "ok\n")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(address, "/elsewhere")


def exchange(address: str, request: bytes) -> bytes:
    """All that comes back until the agent closes the connection."""
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), HANG_SECONDS) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(4096), b""))


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /healthz HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /healthz?verbose HTTP/1.1\r\nHost: here\r\n\r\n", b"200"),
        (b"HEAD /healthz HTTP/1.1\r\nHost: here\r\n\r\n", b"405"),
        (b"POST /metrics HTTP/1.1\r\nHost: here\r\nContent-Length: 2\r\n\r\nhi", b"405"),
        (b"\x16\x03\x01 what a TLS client says first\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/1.1\r\nHost: here\r\nLong: " + 20_000 * b"x", b"400"),
    ],
)
def test_whatever_is_asked_has_one_answer_and_then_the_connection_ends(
    agent: AgentProcess, address: str, request_bytes: bytes, status: bytes
) -> None:
    answer = exchange(address, request_bytes)
    assert answer.split()[1] == status
    assert get(address, "/healthz") == (200, "ok\n")
    assert "Traceback" not in agent.log_text()


def test_who_connects_and_asks_nothing_keeps_nobody_waiting(agent: AgentProcess, address: str) -> None:
    host, _, port = address.partition(":")
    silent = [socket.create_connection((host, int(port)), HANG_SECONDS) for _ in range(50)]
    try:
        assert get(address, "/readyz") == (200, "ok\n")
        for connection in silent:
            assert connection.recv(1) == b"", "the agent ends it"
    finally:
        for connection in silent:
            connection.close()
    agent.terminate()
    assert agent.wait(HANG_SECONDS) == 0


@needs_ipv6
def test_where_an_injected_pods_agent_listens_ipv4_and_ipv6_reach_it(tmp_path: Path) -> None:
    """As a cluster may have IPv6 alone, or both."""
    injection = Injection(destination="s3://bucket/run", run_as_user=1000)
    pod = {"metadata": {}, "spec": {"containers": [{"name": "train", "image": "example.com/train:1"}]}}
    mutation = mutate(pod, injection, InjectionDefaults(image="example.com/keepstep:1"))
    assert isinstance(mutation, Mutation)
    containers = [one for step in mutation.patch if step["path"] == "/spec/initContainers" for one in step["value"]]
    variables = {one["name"]: one["value"] for one in containers[-1]["env"]}
    port = free_port()
    injected = variables["KEEPSTEP_HTTP_ADDRESS"].replace(str(POD_METRICS_PORT), str(port))
    with AgentProcess(tmp_path / "volume", f"file://{tmp_path}/bucket", http_address=injected) as agent:
        wait_until(lambda: bool(agent.log("http.serving")), HANG_SECONDS, "the pages are served")
        assert get(f"127.0.0.1:{port}", "/healthz") == (200, "ok\n")
        assert get(f"[::1]:{port}", "/healthz") == (200, "ok\n")


def test_an_address_in_use_is_a_clear_error(agent: AgentProcess, address: str, tmp_path: Path) -> None:
    other = AgentProcess(tmp_path / "other", f"file://{tmp_path}/bucket", http_address=address)
    assert other.start_refused() == 1
    assert f"error: cannot listen on {address}" in other.log_text()
    assert "hint: give --http-address as host:port with a free port" in other.log_text()


@pytest.mark.parametrize("service", ["", SERVICE])
def test_standard_grpc_health_answers_on_the_socket(agent: AgentProcess, service: str) -> None:
    with grpc.insecure_channel(f"unix:{agent.socket}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=HANG_SECONDS)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_standard_grpc_reflection_names_the_services(agent: AgentProcess) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with grpc.insecure_channel(f"unix:{agent.socket}") as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        answer = next(stub.ServerReflectionInfo(iter([request]), timeout=HANG_SECONDS))
    names = {service.name for service in answer.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names
