"""What the agent tells Kubernetes arrives there, with the rights and the certificate that a pod has."""

import asyncio
import gc
import socket
import ssl
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.fakes.fake_api_server import FakeApiServer, Mood
from tests.fakes.fake_cluster import FakeCluster
from tests.harness.bounds import HANG_SECONDS
from tests.servers.tls import Certificate, make_certificate

from keepstep_agent.adapters.kubernetes import ApiServer, KubernetesCluster
from keepstep_agent.core.errors import ClusterError, ErrorKind
from keepstep_agent.core.settings.values import ClusterSettings
from keepstep_agent.ports import Cluster, EventType, PodEvent

KEY = "keepstep.dev/last-committed"
EVENT = PodEvent(event_type=EventType.WARNING, reason="CheckpointLost", message="it is lost", at=1_800_000_000.0)


@pytest.fixture
def server(certificate: Certificate) -> Iterator[FakeApiServer]:
    with FakeApiServer(namespace="ml", certificate=certificate) as server:
        server.shelf.create("pods", {"metadata": {"name": "trainer-0", "annotations": {"of": "the user"}}})
        yield server


@pytest.fixture
def settings(server: FakeApiServer, tmp_path: Path) -> ClusterSettings:
    address = urlsplit(server.url)
    return ClusterSettings(
        cluster_events=True,
        pod_name="trainer-0",
        pod_uid="a-uid",
        kubernetes_host=str(address.hostname),
        kubernetes_port=address.port or 0,
        service_account_directory=str(server.service_account(tmp_path / "account")),
    )


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


class Told:
    """A cluster, and what it may not or does not do."""

    def __init__(self, cluster: Cluster, server: FakeApiServer | None) -> None:
        self.cluster = cluster
        self._server = server

    def forbid(self, resource: str) -> None:
        if self._server is not None:
            self._server.allowed = lambda _verb, asked, _name: asked != resource
        elif isinstance(self.cluster, FakeCluster):
            self.cluster.forbidden.add(resource)

    def break_down(self) -> None:
        if self._server is not None:
            self._server.mood = Mood.BROKEN
        elif isinstance(self.cluster, FakeCluster):
            self.cluster.problem = ErrorKind.UNREACHABLE


@pytest.fixture(params=["fake", "kubernetes"])
def told(request: pytest.FixtureRequest, server: FakeApiServer, settings: ClusterSettings, executor: Any) -> Told:
    if request.param == "fake":
        return Told(FakeCluster(), None)
    return Told(KubernetesCluster(settings, executor), server)


async def test_events_and_annotations_are_taken(told: Told) -> None:
    await told.cluster.tell(EVENT)
    await told.cluster.tell(EVENT)
    await told.cluster.annotate(KEY, "one")
    await told.cluster.annotate(KEY, "two")
    await told.cluster.close()


async def test_what_is_forbidden_is_denied_and_the_other_goes_on(told: Told) -> None:
    told.forbid("events")
    with pytest.raises(ClusterError) as refusal:
        await told.cluster.tell(EVENT)
    assert refusal.value.kind is ErrorKind.ACCESS_DENIED
    assert refusal.value.hint
    await told.cluster.annotate(KEY, "one")
    await told.cluster.close()


async def test_a_cluster_that_is_broken_is_an_error_that_may_pass(told: Told) -> None:
    told.break_down()
    with pytest.raises(ClusterError) as refusal:
        await told.cluster.tell(EVENT)
    assert refusal.value.kind is ErrorKind.UNREACHABLE
    assert refusal.value.retryable
    await told.cluster.close()


async def test_an_event_is_the_pods_own_as_kubectl_describe_looks_for_it(
    server: FakeApiServer, settings: ClusterSettings, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    create = server.shelf.create

    def noted(resource: str, content: Mapping[str, Any]) -> dict[str, Any]:
        taken.append(content)
        return create(resource, content)

    monkeypatch.setattr(server.shelf, "create", noted)
    cluster = KubernetesCluster(settings, executor)
    await cluster.tell(replace(EVENT, message="m" * 5000))
    await cluster.close()
    (event,) = taken
    assert event["involvedObject"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": "trainer-0",
        "namespace": "ml",
        "uid": "a-uid",
    }
    assert (event["type"], event["reason"]) == ("Warning", "CheckpointLost")
    assert event["firstTimestamp"] == event["lastTimestamp"] == "2027-01-15T08:00:00Z"
    # More is refused by a real one.
    assert len(event["message"]) == 1024
    assert event["metadata"]["namespace"] == "ml"


async def test_the_users_annotations_stay(
    server: FakeApiServer, settings: ClusterSettings, executor: ThreadPoolExecutor
) -> None:
    cluster = KubernetesCluster(settings, executor)
    await cluster.annotate(KEY, "one")
    await cluster.close()
    assert server.shelf.get("pods", "trainer-0")["metadata"]["annotations"] == {"of": "the user", KEY: "one"}


async def test_a_token_that_kubelet_has_renewed_is_used_at_the_next_call(
    settings: ClusterSettings, executor: ThreadPoolExecutor
) -> None:
    token = Path(settings.service_account_directory) / "token"
    right = token.read_text()
    token.write_text("an-old-one")
    cluster = KubernetesCluster(settings, executor)
    with pytest.raises(ClusterError, match="401") as refusal:
        await cluster.tell(EVENT)
    # Not for ever: the account may, its token is old.
    assert refusal.value.kind is not ErrorKind.ACCESS_DENIED
    token.write_text(right)
    await cluster.tell(EVENT)
    await cluster.close()


async def test_a_server_with_another_ca_is_not_told_the_token(
    server: FakeApiServer, settings: ClusterSettings, executor: ThreadPoolExecutor, tmp_path: Path
) -> None:
    other = make_certificate(tmp_path / "other")
    authority = Path(settings.service_account_directory) / "ca.crt"
    right = authority.read_bytes()
    authority.write_bytes(other.certificate.read_bytes())
    cluster = KubernetesCluster(settings, executor)
    with pytest.raises(ClusterError):
        await cluster.tell(EVENT)
    assert server.asked == []
    authority.write_bytes(right)
    await cluster.tell(EVENT)
    await cluster.close()


async def test_what_is_sent_goes_nowhere_else(
    server: FakeApiServer, settings: ClusterSettings, executor: ThreadPoolExecutor
) -> None:
    """The body of a request may be a private key."""
    with FakeApiServer(namespace="ml") as elsewhere:
        server.mood, server.elsewhere = Mood.MOVED, f"{elsewhere.url}/api/v1/namespaces/ml/events"
        cluster = KubernetesCluster(settings, executor)
        with pytest.raises(ClusterError, match="redirects are not followed"):
            await cluster.tell(EVENT)
        assert elsewhere.asked == []
        server.mood = Mood.WELL
        await cluster.tell(EVENT)
        await cluster.close()


def test_a_connection_that_the_server_does_not_end_ends_with_the_call(
    server: FakeApiServer, settings: ClusterSettings, certificate: Certificate
) -> None:
    """An event loop's own TLS would wait for the server's goodbye, and be garbage with an open socket."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.certificate, certificate.key)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(2) as executor:
        taken = executor.submit(lambda: context.wrap_socket(listener.accept()[0], server_side=True))
        api_server = ApiServer(
            "127.0.0.1",
            listener.getsockname()[1],
            Path(settings.service_account_directory),
            executor,
            # Time enough for the handshake.
            call_seconds=5,
            hint="",
        )

        async def call() -> None:
            with pytest.raises(ClusterError):
                await api_server.call("GET", "/")
            await api_server.close()

        asyncio.run(call())
        with taken.result(HANG_SECONDS) as connection:
            connection.settimeout(HANG_SECONDS)
            while connection.recv(1024):
                pass
    gc.collect()  # pytest would report a socket that is open


@pytest.mark.parametrize("missing", ["token", "ca.crt", "namespace"])
async def test_a_pod_without_a_service_accounts_files_is_told_what_to_set(
    settings: ClusterSettings, executor: ThreadPoolExecutor, missing: str
) -> None:
    (Path(settings.service_account_directory) / missing).unlink()
    cluster = KubernetesCluster(settings, executor)
    with pytest.raises(ClusterError) as refusal:
        await cluster.tell(EVENT)
    assert "automountServiceAccountToken" in refusal.value.hint
    await cluster.close()
