"""Certificates that the webhook makes for itself: made before it serves, renewed while it does, on every replica alike.

It reads and patches two objects by name, the Secret and the webhook's configuration, and creates none: who may create
Secrets may create one with the token of any service account. So the chart makes the Secret, empty. One that is emptied
has everything made anew at once.

No replica leads; order and resource versions keep a rotation safe. The configuration is read before the Secret and
patched only if it is still the one that was read: no older bundle is published over a newer one. The Secret is written
before its bundle is published, and likewise.
"""

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, Final

import structlog

from mooring_agent.adapters.api_server import MERGE_PATCH, ApiServer
from mooring_agent.core.certificate_plan import plan
from mooring_agent.core.errors import ErrorKind, MooringError
from mooring_agent.webhook.certificates import Kept, fingerprint, read_bundle, read_secret
from mooring_agent.webhook.serving_certificate import ServingCertificate
from mooring_agent.webhook.settings import SelfManaged

_CONFIGURATIONS: Final = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
_PATIENT_SECONDS: Final = 5.0  # while an installation is under way, something is missing for a moment

Object = Mapping[str, Any]
log = structlog.get_logger("mooring.webhook")


@contextlib.asynccontextmanager
async def kept_certificates(managed: SelfManaged, certificate: ServingCertificate) -> AsyncIterator[None]:
    """Enter once there is something to serve with; it is kept renewed. Raises MooringError if there is none in time."""
    async with contextlib.AsyncExitStack() as stack:
        cluster = ApiServer(
            managed.kubernetes_host,
            managed.kubernetes_port,
            managed.service_account,
            stack.enter_context(ThreadPoolExecutor(max_workers=1, thread_name_prefix="certificates")),
            call_seconds=managed.pace.call_seconds,
            hint="the chart makes the Secret, the configuration and the rights to get and patch both: `helm upgrade`",
        )
        stack.push_async_callback(cluster.close)
        keeper = CertificateKeeper(cluster, managed, certificate, lambda: datetime.now(UTC))
        await keeper.begin()
        keeping = asyncio.create_task(keeper.keep())
        stack.push_async_callback(asyncio.wait, [keeping])
        stack.callback(keeping.cancel)
        yield


class CertificateKeeper:
    """One replica's: it looks at its cluster again and again, does what is due, and tells what is wrong once."""

    def __init__(
        self, cluster: ApiServer, managed: SelfManaged, certificate: ServingCertificate, now: Callable[[], datetime]
    ) -> None:
        self._cluster = cluster
        self._secret = f"/api/v1/namespaces/{managed.namespace}/secrets/{managed.secret}"
        self._configuration = f"{_CONFIGURATIONS}/{managed.configuration}"
        service = f"{managed.service}.{managed.namespace}.svc"
        self._names = (service, f"{service}.cluster.local")
        self._lives, self._pace = managed.lives, managed.pace
        self._certificate = certificate
        self._now = now
        self._published_since: dict[str, datetime] = {}
        self._told = ""

    async def begin(self) -> None:
        """Until there is something to serve with, and, if that comes soon, API servers trust it."""
        began_at = time.monotonic()
        with contextlib.suppress(MooringError):
            self._certificate.load()  # of a life before this one
        while (problem := await self._look()) is not None:
            waited_seconds = time.monotonic() - began_at
            if self._certificate.seconds_left() > 0:
                if problem.kind is ErrorKind.UNREACHABLE or waited_seconds >= self._pace.publish_seconds:
                    return
            elif waited_seconds >= self._pace.begin_seconds:
                raise problem
            if waited_seconds >= _PATIENT_SECONDS:
                self._tell(problem)
            await asyncio.sleep(self._pace.retry_seconds)

    async def keep(self) -> None:
        """For ever."""
        problem: MooringError | None = None
        while True:
            raced = problem is not None and problem.kind is ErrorKind.ALREADY_EXISTS
            await asyncio.sleep(self._pace.retry_seconds if raced else self._pace.look_seconds)
            problem = await self._look()
            self._tell(problem)

    async def _look(self) -> MooringError | None:
        try:
            await self.look()
        except MooringError as error:
            return error
        except Exception as error:
            # A fault of ours in here must not end a webhook that serves.
            log.exception("certificates.bug")
            return MooringError(ErrorKind.BAD_CONFIGURATION, f"a mistake of ours: {error}", hint="please report it")
        return None

    def _tell(self, problem: MooringError | None) -> None:
        """What needs something else done, once, and when it is over."""
        if problem is None:
            if self._told:
                log.info("certificates.well")
            self._told = ""
        elif problem.kind is not ErrorKind.ALREADY_EXISTS and str(problem) != self._told:
            log.error("certificates.problem", error=str(problem), kind=problem.kind.value, hint=problem.hint)
            self._told = str(problem)

    async def look(self) -> None:
        """Once, and do what is due. Raises MooringError when API servers may not trust what is served; it still is."""
        configuration: Object | MooringError
        try:
            configuration = await self._cluster.call("GET", self._configuration)
            now = self._now()
            self._published_since = {one: self._published_since.get(one, now) for one in published_in(configuration)}
        except MooringError as error:
            configuration = error
        secret = await self._cluster.call("GET", self._secret)
        now = self._now()
        kept = read_secret(secret, self._names[0], now)
        self._serve(kept)
        due = plan(now, *kept.terms, self._published_since, self._lives)
        after = kept.after(due, self._names, now, self._lives)
        if after != kept:
            await self._patch(self._secret, {"data": after.data()}, secret)
            log.info("certificates.renewed", new_authority=due.make_authority, new_certificate=bool(due.sign_with))
            self._serve(after)
        if isinstance(configuration, MooringError):
            raise configuration
        await self._publish(after, configuration)

    def _serve(self, kept: Kept) -> None:
        if kept.leaf is not None:
            self._certificate.put(kept.leaf.certificate_pem + kept.leaf.key_pem)

    async def _publish(self, kept: Kept, configuration: Object) -> None:
        bundle = base64.b64encode(kept.bundle).decode()
        stale = [name for name, text in ca_bundles(configuration).items() if text != bundle]
        if stale:
            webhooks = [{"name": name, "clientConfig": {"caBundle": bundle}} for name in stale]
            await self._patch(self._configuration, {"webhooks": webhooks}, configuration)
            log.info("authorities.published", authorities=len(kept.authorities))

    async def _patch(self, path: str, content: Object, read: Object) -> None:
        """If it still is the version that was read."""
        versioned = {**content, "metadata": {"resourceVersion": read["metadata"]["resourceVersion"]}}
        await self._cluster.call("PATCH", f"{path}?fieldManager=mooring-webhook", versioned, MERGE_PATCH)


def published_in(configuration: Object) -> frozenset[str]:
    """The CAs that all its webhooks trust, by id."""
    bundles = [frozenset(map(fingerprint, read_bundle(text))) for text in ca_bundles(configuration).values()]
    return frozenset.intersection(*bundles) if bundles else frozenset()


def ca_bundles(configuration: Object) -> dict[str, str]:
    """`caBundle` by the webhook's name, as it is written there."""
    webhooks = configuration.get("webhooks") or []
    return {one["name"]: (one.get("clientConfig") or {}).get("caBundle") or "" for one in webhooks}
