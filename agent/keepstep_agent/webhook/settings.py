"""The webhook's settings and limits. The command line fills the settings in once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from keepstep_agent.core.injection.spec import FailurePolicy, InjectionDefaults

MOST_BODY_BYTES: Final = 3 * 1024 * 1024
"""The API server accepts objects of 1.5 MiB; a review may hold two: the pod and its old version."""

MOST_CONNECTIONS: Final = 128
MOST_PROBES: Final = 16
SMALL_BODY_BYTES: Final = 64 * 1024
"""Pods are smaller than this. Small bodies are always accepted, even when the budget of larger ones is used up."""
MOST_LARGE_BODIES_BYTES: Final = 64 * 1024 * 1024
MOST_ANSWER_BYTES: Final = 512 * 1024
"""All of these together, plus a review that is being answered, stay below the memory limit of the chart."""

ANSWER_SECONDS: Final = 1.0
"""What a request may take besides the arrival of the review: for its TLS handshake, and for sending the answer."""
FINISH_SECONDS: Final = 10.0
"""How long requests that have begun may take after the ports are closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateSettings:
    """The Kubernetes objects that have to do with the webhook's certificates, and how to reach them."""

    namespace: str
    service: str
    """The Service that the certificate is for; the API server calls <service>.<namespace>.svc."""
    secret: str
    configuration: str
    """Name of the MutatingWebhookConfiguration that gets the caBundle."""
    kubernetes_host: str
    kubernetes_port: int
    service_account: Path
    wait_seconds: float
    """How long to try again, whatever is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings:
    """The settings of the webhook.

    `certificates` is the folder with tls.crt and tls.key, where the Secret is mounted.
    `listen` and `http_listen` are (host, port); the second is plain HTTP, for probes and metrics. `read_seconds` bounds
    how long a request may take to arrive. For `lame_duck_seconds` after SIGTERM the webhook still answers, until
    clients have stopped sending reviews.
    """

    certificates: Path
    defaults: InjectionDefaults
    failure_policy: FailurePolicy = FailurePolicy.FAIL
    listen: tuple[str, int] = ("", 8443)
    http_listen: tuple[str, int] = ("", 8080)
    read_seconds: float = 5.0
    lame_duck_seconds: float = 5.0
