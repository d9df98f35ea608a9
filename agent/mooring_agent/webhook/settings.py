"""What the webhook is told, once, by its command line or its environment."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mooring_agent.core.injection import FailurePolicy, InjectionDefaults

MOST_BODY_BYTES: Final = 3 * 1024 * 1024
"""The API server takes objects of 1.5 MiB; a review may hold two, the pod and what it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfManaged:
    """The Kubernetes objects of a webhook that makes its own certificates."""

    namespace: str
    service: str
    """Of which the certificate is; the API server calls <service>.<namespace>.svc."""
    secret: str
    lease: str
    configuration: str
    """Name of the MutatingWebhookConfiguration that gets the caBundle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings:
    """`certificates` holds tls.crt and tls.key, put there by cert-manager or by ourselves.

    `listen` and `http_listen` are (host, port); the second is plain HTTP, for probes and metrics. `read_seconds` bounds
    how long a request may take to arrive; `lame_duck_seconds` is how long one that is told to end still answers, until
    nobody sends it anything more.
    """

    certificates: Path
    defaults: InjectionDefaults
    failure_policy: FailurePolicy = FailurePolicy.FAIL
    listen: tuple[str, int] = ("", 8443)
    http_listen: tuple[str, int] = ("", 8080)
    self_managed: SelfManaged | None = None
    read_seconds: float = 5.0
    lame_duck_seconds: float = 5.0
