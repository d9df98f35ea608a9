"""What Keepstep asks of Kubernetes' API, with the pod's service account and the official client.

By it: Events and annotations of the agent's pod, and the Workload by which Kueue queues and preempts the pod's job.
"""

import asyncio
import json
import ssl
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

import aiohttp

from keepstep_agent.adapters.transfer.tls_connector import use_own_tls
from keepstep_agent.core.errors import ClusterError, ErrorKind
from keepstep_agent.core.settings.table import spelled
from keepstep_agent.core.settings.values import ClusterSettings
from keepstep_agent.ports import PodEvent

if TYPE_CHECKING:
    from kubernetes.aio.client.api_client import ApiClient

MERGE_PATCH: Final = "application/strategic-merge-patch+json"
JSON: Final = "application/json"
_MOST_BYTES: Final = 8 * 1024 * 1024
_KINDS: Final = {
    403: ErrorKind.ACCESS_DENIED,
    404: ErrorKind.NOT_FOUND,
    409: ErrorKind.ALREADY_EXISTS,
    429: ErrorKind.THROTTLED,
}


class ApiServer:
    """Makes REST calls to the API server.

    `executor` reads the service account's files in `directory`. `hint` is the error's hint when a call is refused.
    `without` ends the other hints: it says how to run without the API server.
    """

    def __init__(
        self,
        host: str,
        port: int,
        directory: Path,
        executor: Executor,
        *,
        call_seconds: float,
        hint: str,
        without: str = "",
    ) -> None:
        self._address = f"https://{f'[{host}]' if ':' in host else host}:{port}"
        self._directory = directory
        self._executor = executor
        self._call_seconds = call_seconds
        self._hint = hint
        self._without = without
        self._client: ApiClient | None = None
        self._connector: aiohttp.TCPConnector | None = None

    async def call(
        self, method: str, path: str, content: Mapping[str, Any] | None = None, content_type: str = JSON
    ) -> dict[str, Any]:
        """Send a request and return the answer. Raises ClusterError; ALREADY_EXISTS if the object's version changed."""
        headers = {"Authorization": f"Bearer {(await self.read('token')).strip()}", "Content-Type": content_type}
        client = await self.connected()
        limit = aiohttp.ClientTimeout(total=self._call_seconds)
        try:
            answer = await client.call_api(method, self._address + path, headers, content, _request_timeout=limit)
            async with answer.response as response:
                text = (await _read(response.content)).decode(errors="replace")
            found = json.loads(text) if answer.status < 300 else {}
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RecursionError) as error:
            # The next call reads ca.crt again.
            await self.close()
            raise ClusterError(
                ErrorKind.UNREACHABLE,
                f"the API server {self._address} does not answer {method} {path}: {str(error) or type(error).__name__}",
                hint=f"allow the pod to reach the API server{self._without}",
            ) from error
        if answer.status >= 300:
            default = ErrorKind.REQUEST_REFUSED if 400 <= answer.status < 500 else ErrorKind.UNREACHABLE
            problem = f"the API server answers {answer.status} to {method} {path}: {_message(text)}"
            raise ClusterError(_KINDS.get(answer.status, default), problem, hint=self._hint)
        if not isinstance(found, dict):
            raise ClusterError(ErrorKind.UNREACHABLE, f"no API server answers {method} {path}", hint=self._hint)
        return found

    async def read(self, name: str) -> str:
        """Read a file of the service account. Raises ClusterError."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, (self._directory / name).read_text)
        except (OSError, ValueError) as error:
            raise ClusterError(
                ErrorKind.BAD_CONFIGURATION,
                f"the service account's {name} cannot be read: {error}",
                hint=f"set automountServiceAccountToken: true in the pod{self._without}",
            ) from error

    async def close(self) -> None:
        if self._client is not None and self._connector is not None:
            await self._client.close()  # type: ignore[no-untyped-call]  # it has none
            await self._connector.close()
            self._client = self._connector = None
            # Its transports close in the loop's next iteration, and the loop may end after this one.
            await asyncio.sleep(0)

    async def connected(self) -> "ApiClient":
        """Return the client, made at the first call, which imports it. Raises ClusterError."""
        if self._client is None:
            authority = await self.read("ca.crt")
            try:
                make = await asyncio.to_thread(_import_client)
            except Exception as error:
                # Also where it is here and does not go with what else is: its imports raise what they like.
                raise ClusterError(
                    ErrorKind.BAD_CONFIGURATION,
                    f"the client of Kubernetes' API cannot be loaded: {error}",
                    hint=f"uv tool install 'keepstep-agent[kubernetes]', or run Keepstep's image{self._without}",
                ) from error
            try:
                client = make(authority)
            except (ssl.SSLError, ValueError) as error:
                raise ClusterError(
                    ErrorKind.BAD_CONFIGURATION,
                    f"the service account's ca.crt is not a certificate: {error}",
                    hint=f"check what is mounted as the service account{self._without}",
                ) from error
            self._connector = aiohttp.TCPConnector(ssl=client.rest_client.ssl_context, limit=1)
            # An event loop's own TLS would wait, after a call without answer, for a server that may be gone.
            use_own_tls(self._connector)
            # Proxies that the environment names are for the store.
            client.configuration.client_session_kwargs = {"connector": self._connector, "trust_env": False}
            self._client = client
        return self._client


def _import_client() -> "Callable[[str], ApiClient]":
    """Import the part of the package that sends requests: with all objects' types an agent would hold 190 MiB.

    It takes most of a second. Returns what makes a client that trusts an authority, in PEM.
    """
    from kubernetes.aio.client.api_client import ApiClient
    from kubernetes.aio.client.configuration import Configuration

    refusing = aiohttp.TraceConfig()
    refusing.on_request_redirect.append(_refuse_redirect)

    def make(authority: str) -> ApiClient:
        configuration = Configuration(ca_cert_data=authority, trace_configs=[refusing])
        # From Python 3.13 on. The authorities of many clusters lack what it asks for.
        configuration.disable_strict_ssl_verification = True
        return ApiClient(configuration)

    return make


async def _refuse_redirect(_session: Any, _context: Any, asked: aiohttp.TraceRequestRedirectParams) -> None:
    """What is sent may be a key, and is for the API server alone."""
    asked.response.close()
    raise aiohttp.ClientError(f"it answers {asked.response.status}, and redirects are not followed")


async def _read(content: aiohttp.StreamReader) -> bytes:
    """Read up to the limit, so that no answer can fill the agent's memory."""
    pieces, left = [], _MOST_BYTES
    while left > 0 and (piece := await content.read(left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _message(text: str) -> str:
    """Return the message of a Status object, or the start of any other text."""
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return text[:200]


_COMPONENT: Final = "keepstep-agent"
_CALL_SECONDS: Final = 10.0
_MESSAGE_LIMIT: Final = 1024
_POD_NAME_LIMIT: Final = 230


def _api_server(settings: ClusterSettings, executor: Executor, *, hint: str, without: str) -> ApiServer:
    return ApiServer(
        settings.kubernetes_host,
        settings.kubernetes_port,
        Path(settings.service_account_directory),
        executor,
        call_seconds=_CALL_SECONDS,
        hint=hint,
        without=without,
    )


class KubernetesCluster:
    """`ports.Cluster` by the API server. `executor` reads the service account's files."""

    def __init__(self, settings: ClusterSettings, executor: Executor) -> None:
        self._settings = settings
        self._api_server = _api_server(
            settings,
            executor,
            hint="give the pod's service account a Role that may create events and patch pods",
            without=f", or set {spelled('cluster.cluster_events')} to false",
        )

    async def prepare(self) -> None:
        await self._api_server.connected()

    async def tell(self, event: PodEvent) -> None:
        namespace = await self._namespace()
        pod = self._settings.pod_name
        at = datetime.fromtimestamp(event.at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        content = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{pod[:_POD_NAME_LIMIT]}.{uuid.uuid4().hex[:16]}", "namespace": namespace},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": pod,
                "namespace": namespace,
                **({"uid": self._settings.pod_uid} if self._settings.pod_uid else {}),
            },
            "type": event.event_type.value,
            "reason": event.reason,
            "message": event.message[:_MESSAGE_LIMIT],
            "source": {"component": _COMPONENT},
            "reportingComponent": _COMPONENT,
            "reportingInstance": pod,
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
        await self._api_server.call("POST", f"/api/v1/namespaces/{namespace}/events", content)

    async def annotate(self, key: str, value: str) -> None:
        namespace = await self._namespace()
        content = {"metadata": {"annotations": {key: value}}}
        path = f"/api/v1/namespaces/{namespace}/pods/{self._settings.pod_name}"
        await self._api_server.call("PATCH", path, content, MERGE_PATCH)

    async def close(self) -> None:
        await self._api_server.close()

    async def _namespace(self) -> str:
        return self._settings.pod_namespace or (await self._api_server.read("namespace")).strip()


BOOST_ANNOTATION: Final = "kueue.x-k8s.io/priority-boost"
JOB_LABEL: Final = "kueue.x-k8s.io/job-uid"
# Newer releases of Kueue serve both, older ones the second alone.
_VERSIONS: Final = ("v1beta2", "v1beta1")
_PLAIN_MERGE_PATCH: Final = "application/merge-patch+json"


class KueueWorkload:
    """`ports.Workload` by the API server. `executor` reads the service account's files."""

    def __init__(self, settings: ClusterSettings, executor: Executor) -> None:
        self._settings = settings
        by_label = f"{JOB_LABEL}={settings.job_uid or settings.pod_uid}"
        self._selectors = {"labelSelector": by_label}
        if settings.workload_name:
            self._selectors = {"fieldSelector": f"metadata.name={settings.workload_name}", **self._selectors}
        self._api_server = _api_server(
            settings,
            executor,
            hint="give the pod's service account a Role that may list and patch Kueue's workloads",
            without=f", or set {spelled('cluster.priority_boost')} to 0",
        )
        self._path = ""

    async def boost(self, value: int) -> None:
        """Set the Workload's annotation. Raises ClusterError; NOT_FOUND: Kueue does not manage this job."""
        if not self._path:
            self._path = await self._find()
        content = {"metadata": {"annotations": {BOOST_ANNOTATION: str(value)}}}
        try:
            await self._api_server.call("PATCH", self._path, content, _PLAIN_MERGE_PATCH)
        except ClusterError as error:
            if error.kind is ErrorKind.NOT_FOUND:
                # Kueue may make another one for the same job.
                self._path = ""
            raise

    async def close(self) -> None:
        await self._api_server.close()

    async def _find(self) -> str:
        namespace = self._settings.pod_namespace or (await self._api_server.read("namespace")).strip()
        for version in _VERSIONS:
            path = f"/apis/kueue.x-k8s.io/{version}/namespaces/{namespace}/workloads"
            try:
                for selector in self._selectors.items():
                    query = urlencode([selector, ("limit", "1")])
                    if name := _first_name(await self._api_server.call("GET", f"{path}?{query}")):
                        return f"{path}/{quote(name, safe='')}"
            except ClusterError as error:
                if error.kind is ErrorKind.NOT_FOUND and version != _VERSIONS[-1]:
                    continue
                raise
            break
        raise ClusterError(
            ErrorKind.NOT_FOUND,
            f"Kueue has no Workload with {' or '.join(self._selectors.values())}",
            hint=f"set {spelled('cluster.priority_boost')} for jobs that Kueue manages; outside injected pods also set "
            "--job-uid, the uid of the job that it manages",
        )


def _first_name(found: dict[str, Any]) -> str:
    try:
        return str(found["items"][0]["metadata"]["name"])
    except (LookupError, TypeError):
        return ""
