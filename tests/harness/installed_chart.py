"""A fake API server on which the real chart is installed, as far as the webhook's certificates go.

It has the chart's three objects, and gives the webhook the rights that the chart gives it, and no more.
"""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from tests.chart.rendering import NAMESPACE, of_kind, render
from tests.fakes.fake_api_server import FakeApiServer

from mooring_agent.webhook.settings import SelfManaged

MANAGED: Final = SelfManaged(
    namespace=NAMESPACE,
    service="mooring-webhook",
    secret="mooring-webhook-certificates",
    lease="mooring-webhook",
    configuration="mooring",
)
SERVICE: Final = f"{MANAGED.service}.{MANAGED.namespace}.svc"


@contextmanager
def installed_chart() -> Iterator[FakeApiServer]:
    objects = render()
    api = FakeApiServer(namespace=NAMESPACE)
    for kind, name, resource in (
        ("Secret", MANAGED.secret, "secrets"),
        ("Lease", MANAGED.lease, "leases"),
        ("MutatingWebhookConfiguration", MANAGED.configuration, "mutatingwebhookconfigurations"),
    ):
        api.shelf.create(resource, of_kind(objects, kind, name))
    rules = [rule for kind in ("Role", "ClusterRole") for rule in of_kind(objects, kind)["rules"]]
    api.allowed = lambda verb, resource, name: any(
        verb in rule["verbs"] and resource in rule["resources"] and name in rule["resourceNames"] for rule in rules
    )
    with api:
        yield api


def published(api: FakeApiServer) -> bytes:
    """The bundle that API servers trust the webhook by."""
    (webhook,) = configuration_of(api)["webhooks"]
    return base64.b64decode(webhook["clientConfig"].get("caBundle", ""))


def configuration_of(api: FakeApiServer) -> dict[str, Any]:
    return api.shelf.get("mutatingwebhookconfigurations", MANAGED.configuration)


def withdraw(api: FakeApiServer) -> None:
    """The bundle, as somebody does who applies the chart's manifest over everything."""
    webhooks = [{"name": one["name"], "clientConfig": {"caBundle": None}} for one in configuration_of(api)["webhooks"]]
    api.shelf.patch("mutatingwebhookconfigurations", MANAGED.configuration, {"webhooks": webhooks})
