"""In a namespace with a LimitRange an injected pod is admitted wherever the trainer alone is, or its message helps."""

from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from tests.injection.golden_pods import IMAGE, inject
from tests.injection.limit_range import LimitRange, admit
from tests.injection.pods import pods
from tests.injection.promises import OURS
from tests.injection.small_pods import container
from tests.injection.test_promises import DEFAULTS, PATIENT

from keepstep_agent.core.injection.spec import InjectionDefaults, Mutation

WEBHOOK = InjectionDefaults(image=IMAGE)
SMALL = {"limits": {"cpu": "8", "memory": "32Gi"}, "requests": {"cpu": "4", "memory": "32Gi"}}


def pod(resources: dict[str, Any], **annotations: str) -> Any:
    said = {"inject": "true", "destination": "s3://bucket/run", "run-as-user": "1000", **annotations}
    trainer = {"name": "train", "image": "example.com/train:1", "resources": resources}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "train-",
            "annotations": {f"keepstep.dev/{name.replace('_', '-')}": text for name, text in said.items()},
        },
        "spec": {"restartPolicy": "Never", "containers": [trainer]},
    }


@pytest.mark.parametrize(
    ("limit_range", "request_and_limit"),
    [
        (LimitRange(default={"cpu": "100m"}), ("100m", "100m")),
        (LimitRange(default={"cpu": "100m", "memory": "64Mi"}), ("100m", "100m")),
        (LimitRange(default={"cpu": "200m"}, most={"cpu": "8"}, least={"cpu": "50m"}), ("200m", "200m")),
        (LimitRange(default={"cpu": "1"}, default_request={"cpu": "100m"}), ("250m", "1")),
        (LimitRange(most={"cpu": "8"}), ("250m", "8")),
        (LimitRange(default_request={"cpu": "1", "memory": "1Gi"}), ("250m", None)),
        (LimitRange(default={"cpu": "100m", "ephemeral-storage": "64Mi"}), ("100m", "100m")),
    ],
    ids=str,
)
def test_a_request_is_no_more_than_the_limit_that_the_namespace_gives(
    limit_range: LimitRange, request_and_limit: tuple[str, str | None]
) -> None:
    """Else the API server refuses the pod, and its message names neither the webhook nor an annotation."""
    admitted = admit(pod(SMALL), limit_range, WEBHOOK)
    assert admitted.problems == ()
    for name in OURS:
        resources = container(admitted.pod, name)["resources"]
        assert (resources["requests"]["cpu"], resources["limits"].get("cpu")) == request_and_limit
        assert resources["requests"]["memory"] == resources["limits"]["memory"] == "256Mi"


def test_who_creates_the_pod_reads_which_annotation_sets_what_the_namespace_limits() -> None:
    admitted = admit(pod(SMALL), LimitRange(default={"cpu": "100m"}), WEBHOOK)
    assert admitted.warnings == (
        "a LimitRange or another webhook limits the agent's CPU to 100m, which may slow its uploads: keepstep.dev/cpu "
        "sets its request and limit",
    )


@pytest.mark.parametrize(
    "limit_range",
    [
        LimitRange(least={"cpu": "500m", "memory": "512Mi"}, most={"cpu": "16", "memory": "64Gi"}),
        LimitRange(default={"cpu": "2"}, ratio={"cpu": "2"}),
        LimitRange(ratio={"cpu": "2", "memory": "1"}),
        LimitRange(most={"cpu": "8", "memory": "32Gi"}, ratio={"cpu": "2", "memory": "1"}),
    ],
    ids=str,
)
def test_the_annotations_meet_what_nothing_in_a_pod_shows(limit_range: LimitRange) -> None:
    """A least amount, or a ratio of limit to request."""
    assert admit(pod(SMALL), limit_range, WEBHOOK).problems
    admitted = admit(pod(SMALL, cpu="1", memory="512Mi"), limit_range, WEBHOOK)
    assert admitted.problems == ()
    assert admitted.warnings == ()


_CPU = st.sampled_from(["10m", "100m", "250m", "1", "64"])
_MEMORY = st.sampled_from(["64Mi", "1Gi", "64Gi"])
_AMOUNTS = st.fixed_dictionaries({}, optional={"cpu": _CPU, "memory": _MEMORY, "ephemeral-storage": _MEMORY})


@PATIENT
@given(pods(), st.builds(LimitRange, default=_AMOUNTS, default_request=_AMOUNTS), DEFAULTS)
def test_no_default_of_a_namespace_puts_our_requests_above_their_limits(
    made: dict[str, Any], limit_range: LimitRange, defaults: InjectionDefaults
) -> None:
    if not isinstance(inject(made, defaults), Mutation):
        event("not injected")
        return
    admitted = admit(made, limit_range, defaults)
    ours = [problem for problem in admitted.problems if problem.partition(":")[0] in OURS]
    # An admin may write a default request above the default limit: then no container without both is admitted.
    if not any(name in limit_range.default for name in limit_range.default_request):
        assert ours == []
    again = inject(admitted.pod, defaults)
    assert isinstance(again, Mutation)
    assert again.patch == ()
