"""A fake API server on which the real chart is installed, as far as the webhook's certificates go.

It has the chart's two objects, and gives the webhook the rights that the chart gives it, and no more.
"""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from tests.chart.rendering import NAMESPACE, of_kind, render
from tests.fakes.fake_api_server import FakeApiServer
from tests.servers.tls import make_certificate

from keepstep_agent.core.policies.certificate_rotation import CertificateLifetimes
from keepstep_agent.webhook.certificates import SecretContent, make_authority, make_leaf
from keepstep_agent.webhook.settings import SelfManaged

MANAGED: Final = SelfManaged(
    namespace=NAMESPACE,
    service="keepstep-webhook",
    secret="keepstep-webhook-certificates",
    configuration="keepstep",
)
SERVICE: Final = f"{MANAGED.service}.{MANAGED.namespace}.svc"


@contextmanager
def installed_chart(folder: Path) -> Iterator[FakeApiServer]:
    """Over TLS, with the service account's files in `folder`."""
    objects = render()
    api = FakeApiServer(namespace=NAMESPACE, certificate=make_certificate(folder / "api-server"))
    api.service_account(folder / "service-account")
    for kind, name, resource in (
        ("Secret", MANAGED.secret, "secrets"),
        ("MutatingWebhookConfiguration", MANAGED.configuration, "mutatingwebhookconfigurations"),
    ):
        api.shelf.create(resource, of_kind(objects, kind, name))
    rules = [rule for kind in ("Role", "ClusterRole") for rule in of_kind(objects, kind)["rules"]]
    api.allowed = lambda verb, resource, name: any(
        verb in rule["verbs"] and resource in rule["resources"] and name in rule["resourceNames"] for rule in rules
    )
    with api:
        yield api


def managed_in(api: FakeApiServer, folder: Path) -> SelfManaged:
    """As a webhook in the pod of the chart sees its cluster; `folder` as in `installed_chart`."""
    address = urlsplit(api.url)
    assert address.hostname
    assert address.port
    return replace(
        MANAGED,
        kubernetes_host=address.hostname,
        kubernetes_port=address.port,
        service_account=folder / "service-account",
    )


def kept_when_due() -> SecretContent:
    """A CA past two thirds of its life, with a young leaf: what a rotation begins with."""
    now, lives = datetime.now(UTC), CertificateLifetimes()
    authority = make_authority(now - lives.authority * 0.7, lives)
    names = {SERVICE, f"{SERVICE}.cluster.local"}
    return SecretContent(authorities=(authority,), leaf=make_leaf(authority, names, now, lives), issuer=authority.id)


def bundle_patch(configuration: dict[str, Any], bundle: str | None) -> dict[str, Any]:
    """That publishes it, in base64, or with None takes away what is published."""
    webhooks = [{"name": one["name"], "clientConfig": {"caBundle": bundle}} for one in configuration["webhooks"]]
    return {"webhooks": webhooks}


def published(api: FakeApiServer) -> bytes:
    """The bundle that API servers trust the webhook by."""
    (webhook,) = configuration_of(api)["webhooks"]
    return base64.b64decode(webhook["clientConfig"].get("caBundle", ""))


def configuration_of(api: FakeApiServer) -> dict[str, Any]:
    return api.shelf.get("mutatingwebhookconfigurations", MANAGED.configuration)


def withdraw(api: FakeApiServer) -> None:
    """The bundle, as somebody does who applies the chart's manifest over everything."""
    publish(api, None)


def publish(api: FakeApiServer, bundle: str | None) -> None:
    patch = bundle_patch(configuration_of(api), bundle)
    api.shelf.patch("mutatingwebhookconfigurations", MANAGED.configuration, patch)
