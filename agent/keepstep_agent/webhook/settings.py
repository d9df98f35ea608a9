"""The webhook's settings and limits. The command line fills the settings in once."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from keepstep_agent.core.injection.spec import FailurePolicy, InjectionDefaults
from keepstep_agent.core.policies.certificate_rotation import CertificateLifetimes

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


SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateTimings:
    """How often a webhook that makes its own certificates checks its cluster, and how long it waits.

    It checks every `look_seconds`, and after `retry_seconds` while it starts or after a conflict. No call lasts longer
    than `call_seconds`. The start fails without a certificate after `begin_seconds`. It waits up to `publish_seconds`
    of these until API servers trust the certificate; at an installation that is when Helm has made the last object.
    """

    look_seconds: float = 10.0
    retry_seconds: float = 1.0
    call_seconds: float = 5.0
    begin_seconds: float = 90.0
    publish_seconds: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfManaged:
    """The Kubernetes objects of a webhook that makes its own certificates. Only tests set `lifetimes` and `timings`."""

    namespace: str
    service: str
    """The Service that the certificate is for; the API server calls <service>.<namespace>.svc."""
    secret: str
    configuration: str
    """Name of the MutatingWebhookConfiguration that gets the caBundle."""
    kubernetes_host: str = ""
    kubernetes_port: int = 443
    service_account: Path = SERVICE_ACCOUNT
    lifetimes: CertificateLifetimes = field(default_factory=CertificateLifetimes)
    timings: CertificateTimings = field(default_factory=CertificateTimings)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings:
    """The settings of the webhook.

    `certificates` is the folder with tls.crt and tls.key from cert-manager, or with the certificate that we made.
    `listen` and `http_listen` are (host, port); the second is plain HTTP, for probes and metrics. `read_seconds` bounds
    how long a request may take to arrive. For `lame_duck_seconds` after SIGTERM the webhook still answers, until
    clients have stopped sending reviews.
    """

    certificates: Path
    defaults: InjectionDefaults
    failure_policy: FailurePolicy = FailurePolicy.FAIL
    listen: tuple[str, int] = ("", 8443)
    http_listen: tuple[str, int] = ("", 8080)
    self_managed: SelfManaged | None = None
    read_seconds: float = 5.0
    lame_duck_seconds: float = 5.0
