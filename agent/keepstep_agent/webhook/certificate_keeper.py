"""Makes the webhook's certificates before it serves, renews them while it serves, and swaps the served one."""

import asyncio
import base64
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import structlog
from cryptography import x509

from keepstep_agent.adapters.kubernetes import MERGE_PATCH, ApiServer
from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_agent.core.policies.certificate_rotation import plan
from keepstep_agent.webhook.certificates import SecretContent, fingerprint, read_bundle, read_secret
from keepstep_agent.webhook.settings import SelfManaged

_FILES: Final = ("tls.crt", "tls.key")  # as cert-manager names them
_OWN_FILE: Final = "own.pem"
"""Certificate and key that we made, in one file, so that both change together. It outlives a container."""
_LOOK_SECONDS: Final = 5.0

log = structlog.get_logger("keepstep.webhook")


class ServingCertificate:
    """The certificate that is served. `context` serves the newest one loaded; open connections keep theirs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: list[bytes] = []
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.sni_callback = self._hand_on
        self._serving: ssl.SSLContext | None = None
        self.expires_at: datetime | None = None

    def put(self, pair: bytes) -> None:
        """Serve with this certificate and its key, in PEM. Raises KeepstepError if the folder cannot be written."""
        if self._loaded == [pair]:
            return
        made = self._folder / f"{_OWN_FILE}.new"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            made.touch(0o600)
            made.write_bytes(pair)
            made.replace(self._folder / _OWN_FILE)
        except OSError as error:
            raise KeepstepError(
                ErrorKind.BAD_CONFIGURATION,
                f"the certificates cannot be written to {self._folder}: {error}",
                hint="use an emptyDir, not a Secret: with --self-managed the folder must be writable",
            ) from error
        self.load()

    def load(self) -> None:
        """Load the certificate from the folder. Raises KeepstepError if there is none that can serve."""
        own = self._folder / _OWN_FILE
        files = [own] if own.exists() else [self._folder / name for name in _FILES]
        try:
            found = [path.read_bytes() for path in files]
            if found == self._loaded:
                return
            fresh = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            fresh.minimum_version = ssl.TLSVersion.TLSv1_2
            fresh.load_cert_chain(files[0], files[-1])
            expires_at = x509.load_pem_x509_certificate(found[0]).not_valid_after_utc
        except (OSError, ValueError) as error:
            raise KeepstepError(
                ErrorKind.BAD_CONFIGURATION,
                f"no certificate to serve with in {self._folder}: {error}",
                hint=f"put {' and '.join(_FILES)} there, in PEM, or use --self-managed",
            ) from error
        self._serving, self._loaded, self.expires_at = fresh, found, expires_at
        log.info("certificate.loaded", expires_at=expires_at.isoformat())

    async def keep_loading(self) -> None:
        """Reload for ever. Kubernetes updates a Secret's volume by changing a link, so the bytes are compared."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await asyncio.to_thread(self.load)
            except KeepstepError as error:
                log.error("certificate.unusable", error=str(error), hint=error.hint)

    def seconds_left(self) -> float:
        """Return the seconds until it expires; negative if it has expired, or if there is none."""
        return float("-inf") if self.expires_at is None else (self.expires_at - datetime.now(UTC)).total_seconds()

    def _hand_on(self, connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _listener: ssl.SSLContext) -> None:
        """Switch a new connection to the newest certificate. Called at each ClientHello, also without a server name."""
        if self._serving is not None:
            connection.context = self._serving


_CONFIGURATIONS: Final = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
_PATIENT_SECONDS: Final = 5.0  # while an installation is under way, something is missing for a moment

Object = Mapping[str, Any]


@contextlib.asynccontextmanager
async def kept_certificates(managed: SelfManaged, certificate: ServingCertificate) -> AsyncIterator[None]:
    """Wait for a certificate to serve with, then keep it renewed. Raises KeepstepError if there is none in time."""
    async with contextlib.AsyncExitStack() as stack:
        cluster = ApiServer(
            managed.kubernetes_host,
            managed.kubernetes_port,
            managed.service_account,
            stack.enter_context(ThreadPoolExecutor(max_workers=1, thread_name_prefix="certificates")),
            call_seconds=managed.timings.call_seconds,
            hint="run `helm upgrade`: the chart creates the Secret, the configuration and the rights to both",
        )
        stack.push_async_callback(cluster.close)
        keeper = CertificateKeeper(cluster, managed, certificate, lambda: datetime.now(UTC))
        await keeper.begin()
        keeping = asyncio.create_task(keeper.keep())
        stack.push_async_callback(asyncio.wait, [keeping])
        stack.callback(keeping.cancel)
        yield


class CertificateKeeper:
    """Keeps one replica's certificates: checks the cluster regularly, does what is due, and logs each problem once."""

    def __init__(
        self, cluster: ApiServer, managed: SelfManaged, certificate: ServingCertificate, now: Callable[[], datetime]
    ) -> None:
        self._cluster = cluster
        self._secret = f"/api/v1/namespaces/{managed.namespace}/secrets/{managed.secret}"
        self._configuration = f"{_CONFIGURATIONS}/{managed.configuration}"
        service = f"{managed.service}.{managed.namespace}.svc"
        self._names = (service, f"{service}.cluster.local")
        self._lifetimes, self._timings = managed.lifetimes, managed.timings
        self._certificate = certificate
        self._now = now
        self._published_since: dict[str, datetime] = {}
        self._logged = ""

    async def begin(self) -> None:
        """Wait until there is a certificate that API servers trust.

        With a certificate it stops waiting when the API server is unreachable, or after `publish_seconds`. Raises
        KeepstepError if there is no certificate after `begin_seconds`.
        """
        began_at = time.monotonic()
        with contextlib.suppress(KeepstepError):
            self._certificate.load()  # what an earlier container left
        while (problem := await self._look()) is not None:
            waited_seconds = time.monotonic() - began_at
            if self._certificate.seconds_left() > 0:
                if problem.kind is ErrorKind.UNREACHABLE or waited_seconds >= self._timings.publish_seconds:
                    return
            elif waited_seconds >= self._timings.begin_seconds:
                raise problem
            if waited_seconds >= _PATIENT_SECONDS:
                self._log_problem(problem)
            await asyncio.sleep(self._timings.retry_seconds)

    async def keep(self) -> None:
        """Check and renew for ever."""
        problem: KeepstepError | None = None
        while True:
            raced = problem is not None and problem.kind is ErrorKind.ALREADY_EXISTS
            await asyncio.sleep(self._timings.retry_seconds if raced else self._timings.look_seconds)
            problem = await self._look()
            self._log_problem(problem)

    async def _look(self) -> KeepstepError | None:
        try:
            await self.look()
        except KeepstepError as error:
            return error
        except Exception as error:
            # A bug of ours must not end a webhook that serves.
            log.exception("certificates.bug")
            return KeepstepError(ErrorKind.BAD_CONFIGURATION, f"a bug in the webhook: {error}", hint="please report it")
        return None

    def _log_problem(self, problem: KeepstepError | None) -> None:
        """Log a problem once, and once more when it is over. Conflicts are not logged: the next check resolves them."""
        if problem is None:
            if self._logged:
                log.info("certificates.well")
            self._logged = ""
        elif problem.kind is not ErrorKind.ALREADY_EXISTS and str(problem) != self._logged:
            log.error("certificates.problem", error=str(problem), kind=problem.kind.value, hint=problem.hint)
            self._logged = str(problem)

    async def look(self) -> None:
        """Check once, and do what is due.

        Raises KeepstepError if API servers may not trust the certificate; it is served all the same.
        """
        configuration: Object | KeepstepError
        try:
            configuration = await self._cluster.call("GET", self._configuration)
            now = self._now()
            self._published_since = {one: self._published_since.get(one, now) for one in published_in(configuration)}
        except KeepstepError as error:
            configuration = error
        secret = await self._cluster.call("GET", self._secret)
        now = self._now()
        kept = read_secret(secret, self._names[0], now)
        self._serve(kept)
        due = plan(now, *kept.terms, self._published_since, self._lifetimes)
        after = kept.after(due, self._names, now, self._lifetimes)
        if after != kept:
            await self._patch(self._secret, {"data": after.data()}, secret)
            log.info("certificates.renewed", new_authority=due.make_authority, new_certificate=bool(due.sign_with))
            self._serve(after)
        if isinstance(configuration, KeepstepError):
            raise configuration
        await self._publish(after, configuration)

    def _serve(self, kept: SecretContent) -> None:
        if kept.leaf is not None:
            self._certificate.put(kept.leaf.certificate_pem + kept.leaf.key_pem)

    async def _publish(self, kept: SecretContent, configuration: Object) -> None:
        bundle = base64.b64encode(kept.bundle).decode()
        stale = [name for name, text in ca_bundles(configuration).items() if text != bundle]
        if stale:
            webhooks = [{"name": name, "clientConfig": {"caBundle": bundle}} for name in stale]
            await self._patch(self._configuration, {"webhooks": webhooks}, configuration)
            log.info("authorities.published", authorities=len(kept.authorities))

    async def _patch(self, path: str, content: Object, read: Object) -> None:
        """Patch the object if it still has the version that was read."""
        versioned = {**content, "metadata": {"resourceVersion": read["metadata"]["resourceVersion"]}}
        await self._cluster.call("PATCH", f"{path}?fieldManager=keepstep-webhook", versioned, MERGE_PATCH)


def published_in(configuration: Object) -> frozenset[str]:
    """Return the ids of the CAs that all webhooks of the configuration trust."""
    bundles = [frozenset(map(fingerprint, read_bundle(text))) for text in ca_bundles(configuration).values()]
    return frozenset.intersection(*bundles) if bundles else frozenset()


def ca_bundles(configuration: Object) -> dict[str, str]:
    """Return each `caBundle`, as written, by its webhook's name."""
    webhooks = configuration.get("webhooks") or []
    return {one["name"]: (one.get("clientConfig") or {}).get("caBundle") or "" for one in webhooks}
