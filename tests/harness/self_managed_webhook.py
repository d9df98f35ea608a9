"""Real webhooks that manage their own certificates, beside a fake API server, and reviews as API servers send them."""

import http.client
import json
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tests.fakes.fake_api_server import FakeApiServer
from tests.harness.bounds import HANG_SECONDS
from tests.harness.hasty_webhook import TIMINGS_VARIABLE
from tests.harness.installed_chart import SERVICE, managed_in
from tests.harness.webhook_process import WebhookProcess


class SelfManagedWebhook(WebhookProcess):
    """One replica, in a folder below the installed chart's. A new CA is trusted soon, by `timings`.
    Started on entry, perhaps not `awaited`."""

    def __init__(self, folder: Path, api: FakeApiServer, *, timings: Mapping[str, float], awaited: bool = True) -> None:
        managed = managed_in(api, folder.parent)
        own = ("namespace", "service", "secret", "configuration")
        names = (*own, "kubernetes_host", "kubernetes_port", "service_account")
        super().__init__(
            folder,
            "--self-managed",
            "--lame-duck-seconds=0",
            *(f"--{name.replace('_', '-')}={getattr(managed, name)}" for name in names),
            launcher=("env", f"{TIMINGS_VARIABLE}={json.dumps(dict(timings))}"),
            module="tests.harness.hasty_webhook",
        )
        self._awaited = awaited

    def __enter__(self) -> Self:
        self.start(wait=self._awaited)
        return self


class Reviewer(http.client.HTTPSConnection):
    """An API server's connection to one webhook: by the Service's name, trusting one bundle."""

    def __init__(self, webhook: WebhookProcess, bundle: bytes) -> None:
        self._trusting = ssl.create_default_context(cadata=bundle.decode())
        super().__init__("127.0.0.1", webhook.port, timeout=HANG_SECONDS, context=self._trusting)

    def connect(self) -> None:
        plain = socket.create_connection((self.host, self.port), timeout=HANG_SECONDS)
        self.sock = self._trusting.wrap_socket(plain, server_hostname=SERVICE)

    def ask(self, review: Mapping[str, Any]) -> dict[str, Any]:
        """The response in the answer."""
        self.request("POST", "/mutate", json.dumps(review), {"Content-Type": "application/json"})
        answer = self.getresponse()
        body = answer.read()
        assert answer.status == 200, body
        response: dict[str, Any] = json.loads(body)["response"]
        return response
