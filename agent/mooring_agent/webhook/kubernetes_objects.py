"""The three objects behind self-managed certificates, read and written through the `kubernetes` package.

Owns the calls: each is bounded in time, is made on one thread of its own, and what comes back is plain JSON or a
MooringError that says what to do. Everything is changed by a strategic merge patch with the resourceVersion it was read
with: what others wrote into the object stays, and who was faster wins (409).

`kubernetes.leaderelection` is not used: it waits with `time.sleep` for ever, ends with any error but an ApiException,
and never gives a lease back.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from enum import StrEnum
from functools import partial
from typing import Any, Final, Protocol

from mooring_agent.core.errors import ErrorKind, MooringError
from mooring_agent.webhook.settings import SelfManaged

Object = Mapping[str, Any]

_FIELD_MANAGER: Final = "mooring-webhook"


class Kind(StrEnum):
    """The objects, each by its resource's name."""

    SECRET = "secrets"  # noqa: S105 - the name of a resource
    LEASE = "leases"
    CONFIGURATION = "mutatingwebhookconfigurations"


class Objects(Protocol):
    """What the keeper needs of a cluster. All raise MooringError; ALREADY_EXISTS: somebody else was faster."""

    async def read(self, kind: Kind) -> Object:
        """As it is now."""

    async def patch(self, kind: Kind, content: Object, read: Object) -> Object:
        """Change the object as it was `read`, if it still is so."""


class KubernetesObjects:
    """`Objects` in a real cluster: the one we run in, or outside of any the one of the kubeconfig."""

    def __init__(self, managed: SelfManaged, executor: Executor, call_seconds: float) -> None:
        self._managed = managed
        self._executor = executor
        self._call_seconds = call_seconds
        self._calls: dict[tuple[str, Kind], Callable[..., Any]] = {}

    async def connect(self) -> None:
        """Nothing is sent yet. Raises MooringError where no cluster is known."""
        self._calls = await asyncio.get_running_loop().run_in_executor(self._executor, _calls, self._managed)

    async def read(self, kind: Kind) -> Object:
        return await self._call("get", kind)

    async def patch(self, kind: Kind, content: Object, read: Object) -> Object:
        version = {"resourceVersion": read["metadata"]["resourceVersion"]}
        return await self._call("patch", kind, {**content, "metadata": version})

    def _name(self, kind: Kind) -> str:
        match kind:
            case Kind.SECRET:
                return self._managed.secret
            case Kind.LEASE:
                return self._managed.lease
            case Kind.CONFIGURATION:
                return self._managed.configuration

    async def _call(self, verb: str, kind: Kind, body: Object | None = None) -> Object:
        what = f"{kind} {self._name(kind)!r}"
        call = partial(_answer, self._calls[verb, kind], body, self._call_seconds)
        try:
            # The call's own limit counts from byte to byte; this one holds whatever happens.
            async with asyncio.timeout(2 * self._call_seconds):
                return await asyncio.get_running_loop().run_in_executor(self._executor, partial(call, what, verb))
        except TimeoutError as error:
            raise _late(verb, what) from error


def _calls(managed: SelfManaged) -> dict[tuple[str, Kind], Callable[..., Any]]:
    # Imported here, on the thread: it takes long, and who has cert-manager needs none of it.
    from kubernetes import client, config

    configuration = client.Configuration()
    try:
        try:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        except config.ConfigException:
            config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except (config.ConfigException, OSError) as error:
        raise MooringError(
            ErrorKind.BAD_CONFIGURATION,
            f"--self-managed, but no cluster to keep the certificates in: {error}",
            hint="mount the ServiceAccount's token (automountServiceAccountToken); outside of a cluster set KUBECONFIG",
        ) from error
    configuration.retries = False  # we look again anyway, and a retry would hide how long an answer takes
    api_client = client.ApiClient(configuration)
    core, coordination = client.CoreV1Api(api_client), client.CoordinationV1Api(api_client)
    admission = client.AdmissionregistrationV1Api(api_client)
    namespace = managed.namespace
    return {
        ("get", Kind.SECRET): partial(core.read_namespaced_secret, managed.secret, namespace),
        ("patch", Kind.SECRET): partial(core.patch_namespaced_secret, managed.secret, namespace),
        ("get", Kind.LEASE): partial(coordination.read_namespaced_lease, managed.lease, namespace),
        ("patch", Kind.LEASE): partial(coordination.patch_namespaced_lease, managed.lease, namespace),
        ("get", Kind.CONFIGURATION): partial(admission.read_mutating_webhook_configuration, managed.configuration),
        ("patch", Kind.CONFIGURATION): partial(admission.patch_mutating_webhook_configuration, managed.configuration),
    }


def _answer(call: Callable[..., Any], body: Object | None, call_seconds: float, what: str, verb: str) -> Object:
    """The answer as it came: the package's own types drop what they do not know."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError
    from urllib3.exceptions import TimeoutError as LateError

    written = {} if body is None else {"body": body, "field_manager": _FIELD_MANAGER}
    try:
        answer = call(**written, _preload_content=False, _request_timeout=call_seconds)
        found: Object = json.loads(answer.data)
    except ApiException as error:
        raise _refused(error.status or 0, _message(error.body) or str(error.reason), what, verb) from error
    except LateError as error:
        raise _late(verb, what) from error
    except (HTTPError, OSError) as error:
        raise MooringError(
            ErrorKind.UNREACHABLE,
            f"the API server cannot be reached: {verb} {what}: {error}",
            hint="it is asked again; a NetworkPolicy must let the webhook's pods reach the API server",
        ) from error
    except ValueError as error:
        raise MooringError(
            ErrorKind.UNREACHABLE,
            f"no API server answers there: {verb} {what}: {error}",
            hint="see what KUBERNETES_SERVICE_HOST or the kubeconfig points to",
        ) from error
    return found


def _late(verb: str, what: str) -> MooringError:
    return MooringError(
        ErrorKind.TIMED_OUT,
        f"the API server did not answer in time: {verb} {what}",
        hint="it is asked again; see whether the API server is well, and whether a NetworkPolicy lets us reach it",
    )


def _message(body: object) -> str:
    """Of a Status, which is what an API server answers with when it refuses."""
    if not isinstance(body, str | bytes):
        return ""
    try:
        return str(json.loads(body).get("message", ""))
    except (ValueError, AttributeError):
        return ""


def _refused(status: int, message: str, what: str, verb: str) -> MooringError:
    match status:
        case 401:
            kind, hint = ErrorKind.ACCESS_DENIED, "the ServiceAccount's token is not accepted: is it mounted, and new?"
        case 403:
            kind = ErrorKind.ACCESS_DENIED
            hint = f"the ServiceAccount needs the rule: {verb} {what}; the chart's Role and ClusterRole have it"
        case 404:
            kind, hint = ErrorKind.NOT_FOUND, "the chart makes it: `helm upgrade` puts it back"
        case 409:
            kind, hint = ErrorKind.ALREADY_EXISTS, "somebody else was faster; it is looked at again"
        case 429:
            kind, hint = ErrorKind.THROTTLED, "the API server is busy; it is asked again"
        case _ if status >= 500:
            kind, hint = ErrorKind.UNREACHABLE, "the API server has trouble; it is asked again"
        case _:
            kind, hint = ErrorKind.REQUEST_REFUSED, "an admission policy or a quota may stand against it"
    return MooringError(kind, f"{verb} {what}: {status}: {message}", hint=hint)
