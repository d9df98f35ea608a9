"""Makes and renews the webhook's certificates, in a Job after the installation and in a CronJob ever after.

It reads the webhook's configuration before the Secret and publishes what is new before it writes the Secret, so that no
replica can serve what is not published. Before that it asks whether the Secret may be written: else each try would
publish another certificate. It patches each only as the version that it read: one that is overtaken begins again.
"""

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, Final

import structlog
from cryptography import x509

from keepstep_agent.adapters.kubernetes import MERGE_PATCH, ApiServer
from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_agent.webhook.certificates import CertificateLifetimes, bundle_of, read_bundle, read_secret, renewed
from keepstep_agent.webhook.settings import CertificateSettings

_CONFIGURATIONS: Final = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
_CALL_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 1.0

Object = Mapping[str, Any]

log = structlog.get_logger("keepstep.certificates")


async def renew_certificates(settings: CertificateSettings) -> None:
    """Do what is due. Raises KeepstepError if it could not be done in `wait_seconds`.

    It waits because an installation makes one object after the other.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="certificates") as executor:
        cluster = ApiServer(
            settings.kubernetes_host,
            settings.kubernetes_port,
            settings.service_account,
            executor,
            call_seconds=_CALL_SECONDS,
            hint="run `helm upgrade`: the chart makes the Secret, the configuration and the rights to both, and a Job",
        )
        ends_at = time.monotonic() + settings.wait_seconds
        problem = ""
        try:
            while True:
                try:
                    await renew_once(cluster, settings, datetime.now(UTC))
                    return
                except KeepstepError as error:
                    if time.monotonic() >= ends_at or error.kind is ErrorKind.BAD_CONFIGURATION:
                        raise
                    if str(error) != problem and error.kind is not ErrorKind.ALREADY_EXISTS:
                        problem = str(error)
                        log.warning("certificates.waiting", error=problem, hint=error.hint)
                await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            await cluster.close()


async def renew_once(cluster: ApiServer, settings: CertificateSettings, now: datetime) -> None:
    """Look once, and do what is due. Raises KeepstepError; ALREADY_EXISTS if another one was faster."""
    configuration_path = f"{_CONFIGURATIONS}/{settings.configuration}"
    secret_path = f"/api/v1/namespaces/{settings.namespace}/secrets/{settings.secret}"
    service = f"{settings.service}.{settings.namespace}.svc"
    names = (service, f"{service}.cluster.local")
    configuration = await cluster.call("GET", configuration_path)
    secret = await cluster.call("GET", secret_path)
    kept, published = read_secret(secret, names, now), published_in(configuration)
    after = renewed(kept, published, names, now, CertificateLifetimes())
    bundle = bundle_of(after, published, now)
    writes_secret = after != kept or (secret.get("data") or {}).get("ca.crt") != bundle
    if writes_secret:
        await _patch(cluster, secret_path, {"data": after.data(bundle)}, secret, is_dry_run=True)
    stale = [name for name, text in ca_bundles(configuration).items() if text != bundle]
    if stale:
        webhooks = [{"name": name, "clientConfig": {"caBundle": bundle}} for name in stale]
        await _patch(cluster, configuration_path, {"webhooks": webhooks}, configuration)
        log.info("certificates.published", certificates=len(read_bundle(bundle)))
    if writes_secret:
        await _patch(cluster, secret_path, {"data": after.data(bundle)}, secret)
        log.info("certificates.renewed", served=after.served != kept.served, following=after.following is not None)


def published_in(configuration: Object) -> list[x509.Certificate]:
    """Return the certificates that all webhooks of the configuration trust."""
    first, *others = [read_bundle(text) for text in ca_bundles(configuration).values()] or [[]]
    return [one for one in first if all(one in other for other in others)]


def ca_bundles(configuration: Object) -> dict[str, str]:
    """Return each `caBundle`, as written, by its webhook's name."""
    webhooks = configuration.get("webhooks") or []
    return {one["name"]: (one.get("clientConfig") or {}).get("caBundle") or "" for one in webhooks}


async def _patch(cluster: ApiServer, path: str, content: Object, read: Object, *, is_dry_run: bool = False) -> None:
    """Patch the object if it still has the version that was read."""
    versioned = {**content, "metadata": {"resourceVersion": read["metadata"]["resourceVersion"]}}
    parameters = "fieldManager=keepstep-certificates" + "&dryRun=All" * is_dry_run
    await cluster.call("PATCH", f"{path}?{parameters}", versioned, MERGE_PATCH)
