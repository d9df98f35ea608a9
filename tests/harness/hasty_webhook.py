"""`keepstep webhook` whose replicas look often and trust a new CA soon, for tests: nothing a user could ask for.

KEEPSTEP_TEST_PACE='{"look_seconds": 0.2}' python -m tests.harness.hasty_webhook webhook …
"""

import json
import os
from dataclasses import replace
from datetime import timedelta
from typing import Final

from keepstep_agent.__main__ import main
from keepstep_agent.webhook import certificate_keeper, server
from keepstep_agent.webhook.settings import WebhookSettings

TIMINGS_VARIABLE: Final = "KEEPSTEP_TEST_PACE"
SETTLE_SECONDS: Final = 20.0
"""How long a new CA has to be seen published; much longer than an API server takes to hear of it."""

_serve = server.serve_webhook


async def _serve_hastily(settings: WebhookSettings) -> None:
    managed = settings.self_managed
    assert managed is not None
    managed = replace(
        managed,
        lifetimes=replace(managed.lifetimes, settle=timedelta(seconds=SETTLE_SECONDS)),
        timings=replace(managed.timings, **json.loads(os.environ[TIMINGS_VARIABLE])),
    )
    await _serve(replace(settings, self_managed=managed))


if __name__ == "__main__":
    server.serve_webhook = _serve_hastily
    certificate_keeper._LOOK_SECONDS = 0.2  # type: ignore[misc]
    main()
