"""`ports.Cluster` over the API server's own REST, with the service account that is mounted into every pod.

Two calls do not need the `kubernetes` package, which costs an agent 20 MiB and a third of a second; aiohttp is there
for the store anyway. The token is read for every call: kubelet renews the file.
"""

import asyncio
import json
import ssl
import uuid
from collections.abc import Mapping
from concurrent.futures import Executor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import aiohttp

from mooring_agent.core.errors import ClusterError, ErrorKind
from mooring_agent.core.settings import ClusterSettings
from mooring_agent.ports import PodEvent

_COMPONENT: Final = "mooring-agent"
_CALL_SECONDS: Final = 10.0
_MESSAGE_LIMIT: Final = 1024
_POD_NAME_LIMIT: Final = 230
_WHY_LIMIT_BYTES: Final = 4096
_KINDS: Final = {
    403: ErrorKind.ACCESS_DENIED,
    404: ErrorKind.NOT_FOUND,
    429: ErrorKind.THROTTLED,
}


class KubernetesCluster:
    """`executor` reads the service account's files."""

    def __init__(self, settings: ClusterSettings, executor: Executor) -> None:
        self._settings = settings
        self._directory = Path(settings.service_account_directory)
        self._executor = executor
        self._session: aiohttp.ClientSession | None = None

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
        await self._call("POST", f"/api/v1/namespaces/{namespace}/events", content, "application/json")

    async def annotate(self, key: str, value: str) -> None:
        namespace = await self._namespace()
        content = {"metadata": {"annotations": {key: value}}}
        path = f"/api/v1/namespaces/{namespace}/pods/{self._settings.pod_name}"
        await self._call("PATCH", path, content, "application/strategic-merge-patch+json")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _namespace(self) -> str:
        return self._settings.pod_namespace or (await self._read("namespace")).strip()

    async def _read(self, name: str) -> str:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, (self._directory / name).read_text)
        except (OSError, ValueError) as error:
            raise ClusterError(
                ErrorKind.BAD_CONFIGURATION,
                f"the service account's {name} cannot be read: {error}",
                hint="set automountServiceAccountToken: true in the pod, or cluster_events to false",
            ) from error

    async def _call(self, method: str, path: str, content: Mapping[str, Any], content_type: str) -> None:
        headers = {"Authorization": f"Bearer {(await self._read('token')).strip()}", "Content-Type": content_type}
        session = await self._connected()
        host = self._settings.kubernetes_host
        address = f"https://{f'[{host}]' if ':' in host else host}:{self._settings.kubernetes_port}"
        try:
            async with session.request(
                method, address + path, data=json.dumps(content), headers=headers, allow_redirects=False
            ) as response:
                status = response.status
                why = "" if status < 300 else (await response.content.read(_WHY_LIMIT_BYTES)).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            # The next call trusts what ca.crt has then.
            await self.close()
            raise ClusterError(
                ErrorKind.UNREACHABLE,
                f"the API server {address} does not answer: {str(error) or type(error).__name__}",
                hint="allow the pod to reach the API server, or set cluster_events to false",
            ) from error
        if status >= 300:
            raise ClusterError(
                _KINDS.get(status, ErrorKind.UNREACHABLE),
                f"the API server answers {status} to {method} {path}: {_message(why)}",
                hint="a Role for the pod's service account needs the verb create on events and patch on pods",
            )

    async def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            authority = await self._read("ca.crt")
            try:
                context = ssl.create_default_context(cadata=authority)
            except (ssl.SSLError, ValueError) as error:
                raise ClusterError(
                    ErrorKind.BAD_CONFIGURATION,
                    f"the service account's ca.crt is no certificate: {error}",
                    hint="see what is mounted at service_account_directory, or set cluster_events to false",
                ) from error
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=context, limit=1),
                timeout=aiohttp.ClientTimeout(total=_CALL_SECONDS),
                trust_env=False,
            )
        return self._session


def _message(text: str) -> str:
    """Of a Status, or whatever it is."""
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]
