"""Calls to an API server, with what it answers beside the object: its refusals and its warnings."""

import http.client
import json
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from tests.harness.bounds import HANG_SECONDS

Object = dict[str, Any]

_CLUSTER_SCOPED: Final = {
    "Namespace",
    "ClusterRole",
    "ClusterRoleBinding",
    "MutatingWebhookConfiguration",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
    "SubjectAccessReview",
}
_STRICT: Final = {"fieldValidation": "Strict"}
_DRY_RUN: Final = {"dryRun": "All"}


class ApiError(Exception):
    """The API server refused; `str()` is its message."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An object as it is stored, or would be, and the warnings that came with it."""

    object: Object
    warnings: tuple[str, ...]


class Api:
    """One user's access."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext) -> None:
        self._host = host
        self._port = port
        self._context = context

    def create(self, content: Object, *, dry_run: bool = False) -> Answer:
        query = urlencode({**_STRICT, **(_DRY_RUN if dry_run else {})})
        return self._call("POST", f"{path_of(content)}?{query}", content, "application/json")

    def create_token(self, account: Object, seconds: int) -> str:
        """Of a ServiceAccount, as kubelet asks for one."""
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": seconds},
        }
        answer = self._call("POST", f"{_named(account)}/token", request, "application/json")
        token: str = answer.object["status"]["token"]
        return token

    def get(self, like: Object) -> Object:
        """The object of the same kind and name."""
        return self._call("GET", _named(like)).object

    def patch(self, like: Object, patch: Mapping[str, Any]) -> Object:
        """Strategic merge."""
        return self._call("PATCH", _named(like), patch, "application/strategic-merge-patch+json").object

    def apply(self, content: Object, manager: str) -> Object:
        """Server-side, as `kubectl apply --server-side --force-conflicts` and newer Helms do it."""
        query = urlencode({"fieldManager": manager, "force": "true", **_STRICT})
        return self._call("PATCH", f"{_named(content)}?{query}", content, "application/apply-patch+yaml").object

    def get_text(self, path: str) -> str:
        status, body, _ = self._send("GET", path, None, {})
        if status != 200:
            raise ApiError(status, "", body)
        return body

    def _call(self, method: str, path: str, content: Any = None, content_type: str = "") -> Answer:
        headers = {"Accept": "application/json", **({"Content-Type": content_type} if content_type else {})}
        status, body, warnings = self._send(method, path, None if content is None else json.dumps(content), headers)
        answer: Object = json.loads(body)
        if status >= 400:
            raise ApiError(status, answer.get("reason", ""), answer.get("message", body))
        return Answer(object=answer, warnings=warnings)

    def _send(
        self, method: str, path: str, body: str | None, headers: Mapping[str, str]
    ) -> tuple[int, str, tuple[str, ...]]:
        connection = http.client.HTTPSConnection(self._host, self._port, timeout=HANG_SECONDS, context=self._context)
        try:
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            warnings = tuple(_warning_text(one) for one in answer.headers.get_all("Warning") or ())
            return answer.status, answer.read().decode(), warnings
        finally:
            connection.close()


def path_of(content: Object) -> str:
    """Of the collection that the object belongs in."""
    version, kind = content["apiVersion"], content["kind"]
    plural = kind.lower().removesuffix("y") + ("ies" if kind.endswith("y") else "s")
    prefix = f"/apis/{version}" if "/" in version else f"/api/{version}"
    if kind in _CLUSTER_SCOPED:
        return f"{prefix}/{plural}"
    return f"{prefix}/namespaces/{content['metadata']['namespace']}/{plural}"


def _named(content: Object) -> str:
    return f"{path_of(content)}/{content['metadata']['name']}"


def _warning_text(header: str) -> str:
    """As in `299 - "what is wrong"`."""
    match = re.fullmatch(r'299 \S+ "(.*)"', header)
    return match[1].replace('\\"', '"') if match else header
