"""A fake API server on which the real chart is installed, as far as the webhook's certificates go.

It has the chart's two objects, and gives the Job the rights that the chart gives it, and no more.
"""

import base64
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from tests.chart.rendering import NAMESPACE, arguments_in, of_kind, render
from tests.fakes.fake_api_server import FakeApiServer
from tests.harness.bounds import HANG_SECONDS
from tests.harness.webhook_process import WebhookProcess
from tests.servers.tls import make_certificate

from keepstep_agent.webhook.certificates import (
    CertificateLifetimes,
    CertificateWithKey,
    SecretContent,
    bundle_of,
    read_secret,
)
from keepstep_agent.webhook.certificates import (
    make_certificate as make_pair,
)
from keepstep_agent.webhook.settings import CertificateSettings

SECRET: Final = "keepstep-webhook-certificates"
CONFIGURATION: Final = "keepstep"
SERVICE: Final = f"keepstep-webhook.{NAMESPACE}.svc"
NAMES: Final = (SERVICE, f"{SERVICE}.cluster.local")
LIVES: Final = CertificateLifetimes()
CONFIGURATIONS: Final = "mutatingwebhookconfigurations"


@contextmanager
def installed_chart(folder: Path) -> Iterator[FakeApiServer]:
    """Over TLS, with the service account's files in `folder`."""
    objects = render()
    api = FakeApiServer(namespace=NAMESPACE, certificate=make_certificate(folder / "api-server"))
    api.service_account(folder / "service-account")
    api.shelf.create("secrets", of_kind(objects, "Secret", SECRET))
    api.shelf.create(CONFIGURATIONS, of_kind(objects, "MutatingWebhookConfiguration", CONFIGURATION))
    rules = [rule for kind in ("Role", "ClusterRole") for rule in of_kind(objects, kind, "keepstep-certs")["rules"]]
    api.allowed = lambda verb, resource, name: any(
        verb in rule["verbs"] and resource in rule["resources"] and name in rule["resourceNames"] for rule in rules
    )
    with api:
        yield api


def settings_in(api: FakeApiServer, folder: Path, wait_seconds: float = HANG_SECONDS) -> CertificateSettings:
    """As the Job sees its cluster; `folder` as in `installed_chart`."""
    address = urlsplit(api.url)
    assert address.hostname
    assert address.port
    return CertificateSettings(
        namespace=NAMESPACE,
        service="keepstep-webhook",
        secret=SECRET,
        configuration=CONFIGURATION,
        kubernetes_host=address.hostname,
        kubernetes_port=address.port,
        service_account=folder / "service-account",
        wait_seconds=wait_seconds,
    )


def run_job(api_url: str, service_account: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    """With the arguments of the chart's Job, in a process of its own."""
    address = urlsplit(api_url)
    return subprocess.run(
        [
            *(sys.executable, "-m", "keepstep_agent"),
            *arguments_in(of_kind(render(), "CronJob", "keepstep-certs")["spec"]["jobTemplate"]["spec"]["template"]),
            f"--kubernetes-host={address.hostname}",
            f"--kubernetes-port={address.port}",
            f"--service-account={service_account}",
            *more,
        ],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )


def mount_secret(webhook: WebhookProcess, secret: Mapping[str, Any]) -> None:
    """As kubelet does a while after the Secret has changed."""
    folder = webhook.folder / f"mounted-{time.monotonic_ns()}"
    folder.mkdir()
    for name in ("tls.crt", "tls.key"):
        (folder / name).write_bytes(base64.b64decode(secret["data"][name]))
    webhook.put_certificate(folder / "tls.crt")


def made(days_ago: float = 0.0) -> CertificateWithKey:
    """A certificate of so many days ago."""
    return make_pair(NAMES, datetime.now(UTC) - timedelta(days=days_ago), LIVES)


def install(api: FakeApiServer, kept: SecretContent) -> None:
    """In the Secret, and published."""
    bundle = bundle_of(kept, (), datetime.now(UTC))
    api.shelf.patch("secrets", SECRET, {"data": kept.data(bundle)})
    publish(api, bundle)


def kept_in(api: FakeApiServer) -> SecretContent:
    return read_secret(api.shelf.get("secrets", SECRET), NAMES, datetime.now(UTC))


def bundle_patch(configuration: dict[str, Any], bundle: str | None) -> dict[str, Any]:
    """That publishes it, in base64, or with None takes away what is published."""
    webhooks = [{"name": one["name"], "clientConfig": {"caBundle": bundle}} for one in configuration["webhooks"]]
    return {"webhooks": webhooks}


def published(api: FakeApiServer) -> bytes:
    """The bundle that API servers trust the webhook by."""
    (webhook,) = configuration_of(api)["webhooks"]
    return base64.b64decode(webhook["clientConfig"].get("caBundle", ""))


def configuration_of(api: FakeApiServer) -> dict[str, Any]:
    return api.shelf.get(CONFIGURATIONS, CONFIGURATION)


def withdraw(api: FakeApiServer) -> None:
    """The bundle, as somebody does who applies the chart's manifest over everything."""
    publish(api, None)


def publish(api: FakeApiServer, bundle: str | None) -> None:
    api.shelf.patch(CONFIGURATIONS, CONFIGURATION, bundle_patch(configuration_of(api), bundle))
