"""What the webhook counts, for /metrics."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mooring_agent.core.admission_review import Outcome


class Metrics:
    """`certificate_seconds_left` is asked whenever somebody looks."""

    def __init__(self, certificate_seconds_left: Callable[[], float]) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._reviews = Counter(
            "mooring_webhook_reviews",
            "Reviews answered, by what became of the pod",
            ["outcome"],
            registry=self.registry,
        )
        for outcome in Outcome:
            self._reviews.labels(outcome.value)
        self._seconds = Histogram(
            "mooring_webhook_review_seconds",
            "From a review's first byte to its answer",
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5),
            registry=self.registry,
        )
        Gauge(
            "mooring_webhook_certificate_seconds_left",
            "Until the certificate that is served expires",
            registry=self.registry,
        ).set_function(certificate_seconds_left)

    def answered(self, outcome: Outcome, seconds: float) -> None:
        self._reviews.labels(outcome.value).inc()
        self._seconds.observe(seconds)
