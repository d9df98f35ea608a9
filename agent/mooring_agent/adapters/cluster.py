"""`ports.Cluster`: Events of the agent's own pod, and an annotation on it."""

import uuid
from concurrent.futures import Executor
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from mooring_agent.adapters.api_server import MERGE_PATCH, ApiServer
from mooring_agent.core.settings import ClusterSettings
from mooring_agent.ports import PodEvent

_COMPONENT: Final = "mooring-agent"
_CALL_SECONDS: Final = 10.0
_MESSAGE_LIMIT: Final = 1024
_POD_NAME_LIMIT: Final = 230


class KubernetesCluster:
    """`executor` reads the service account's files."""

    def __init__(self, settings: ClusterSettings, executor: Executor) -> None:
        self._settings = settings
        self._api_server = ApiServer(
            settings.kubernetes_host,
            settings.kubernetes_port,
            Path(settings.service_account_directory),
            executor,
            call_seconds=_CALL_SECONDS,
            hint="a Role for the pod's service account needs the verb create on events and patch on pods",
            without=", or set cluster_events to false",
        )

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
