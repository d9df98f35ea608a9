"""What the webhook is told, once, by its command line or its environment."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mooring_agent.core.injection.spec import FailurePolicy, InjectionDefaults
from mooring_agent.core.policies.certificate_rotation import CertificateLifetimes

MOST_BODY_BYTES: Final = 3 * 1024 * 1024
"""The API server takes objects of 1.5 MiB; a review may hold two, the pod and what it was."""

MOST_CONNECTIONS: Final = 128
MOST_PROBES: Final = 16
SMALL_BODY_BYTES: Final = 64 * 1024
"""As large as pods are. They have their place in any case, whoever fills the budget of larger ones."""
MOST_LARGE_BODIES_BYTES: Final = 64 * 1024 * 1024
MOST_ANSWER_BYTES: Final = 512 * 1024
"""All of these together, beside a review that is being answered, stay below the memory limit of the chart."""

ANSWER_SECONDS: Final = 1.0
"""What a request may take on top of the review's arrival: its TLS handshake, and its answer's way out."""


SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateTimings:
    """How often a webhook that makes its own certificates looks at its cluster, and what it waits for.

    It looks every `look_seconds`, and after `retry_seconds` while it begins or after a conflict. No call lasts longer
    than `call_seconds`. Within `begin_seconds` there must be a certificate; `publish_seconds` of it may pass until API
    servers trust it, which at an installation is when Helm has made the last object.
    """

    look_seconds: float = 10.0
    retry_seconds: float = 1.0
    call_seconds: float = 5.0
    begin_seconds: float = 90.0
    publish_seconds: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfManaged:
    """The Kubernetes objects of a webhook that makes its own certificates. Only tests change `lives` and `pace`."""

    namespace: str
    service: str
    """Of which the certificate is; the API server calls <service>.<namespace>.svc."""
    secret: str
    configuration: str
    """Name of the MutatingWebhookConfiguration that gets the caBundle."""
    kubernetes_host: str = ""
    kubernetes_port: int = 443
    service_account: Path = SERVICE_ACCOUNT
    lives: CertificateLifetimes = field(default_factory=CertificateLifetimes)
    pace: CertificateTimings = field(default_factory=CertificateTimings)


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
