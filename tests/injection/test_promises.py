"""For any pod that the generators make: what is promised of every injection, and that nothing breaks it."""

import copy
import json
from typing import Any

import jsonpatch
import kubernetes_validate
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from tests.injection.api_server import stored
from tests.injection.golden_pods import IMAGE, KUBERNETES, inject
from tests.injection.pods import broken_pods, garbage, odd_pods, pods
from tests.injection.promises import (
    assert_a_cluster_takes_it,
    assert_nobody_else_has_what_is_the_agents,
    assert_nothing_of_the_users_is_lost,
    assert_ours_are_last,
    class_of,
)

from keepstep_agent.core.injection.admission_review import Outcome, answer
from keepstep_agent.core.injection.json_patch import difference
from keepstep_agent.core.injection.mutation import mutate
from keepstep_agent.core.injection.spec import FailurePolicy, Injection, InjectionDefaults, Mutation, Refusal, Skip

DEFAULTS = st.builds(InjectionDefaults, image=st.just(IMAGE), openshift=st.booleans())
# Two cores may be busy with something else.
PATIENT = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much], max_examples=100
)


def applied(pod: Any, outcome: Mutation) -> Any:
    # As text, as it comes to the API server: a copy of objects would share what two containers have in common.
    return jsonpatch.apply_patch(json.loads(json.dumps(pod)), json.loads(json.dumps(outcome.patch)))


@PATIENT
@given(pods(), DEFAULTS)
def test_a_mutated_pod_is_whole_and_needs_nothing_more(pod: dict[str, Any], defaults: InjectionDefaults) -> None:
    before = copy.deepcopy(pod)
    outcome = inject(pod, defaults)
    assert pod == before
    event(type(outcome).__name__)
    if isinstance(outcome, Refusal):
        assert all(outcome.problems)
        assert outcome.problems
        return
    assert isinstance(outcome, Mutation)
    mutated = applied(pod, outcome)
    assert_nothing_of_the_users_is_lost(pod, mutated)
    assert_a_cluster_takes_it(mutated)
    assert_nobody_else_has_what_is_the_agents(mutated)
    assert_ours_are_last(mutated)
    if not {"keepstep.dev/cpu", "keepstep.dev/memory"} & pod["metadata"]["annotations"].keys():
        assert class_of(mutated) == class_of(pod)
    again = inject(mutated, defaults)
    assert isinstance(again, Mutation)
    assert again.patch == ()


@PATIENT
@given(pods(), DEFAULTS)
def test_what_an_api_server_makes_of_an_injected_pod_needs_nothing_more(
    pod: dict[str, Any], defaults: InjectionDefaults
) -> None:
    before = stored(pod)
    outcome = inject(before, defaults)
    if not isinstance(outcome, Mutation):
        event("not injected")
        return
    again = inject(stored(applied(before, outcome)), defaults)
    assert isinstance(again, Mutation)
    assert again.patch == ()


@PATIENT
@given(pods(), DEFAULTS)
def test_the_grace_period_never_shrinks_and_everybody_is_told_the_same(
    pod: dict[str, Any], defaults: InjectionDefaults
) -> None:
    outcome = inject(pod, defaults)
    if not isinstance(outcome, Mutation):
        return
    spec = applied(pod, outcome)["spec"]
    asked = int(pod["metadata"]["annotations"].get("keepstep.dev/grace-seconds", defaults.grace_seconds))
    said = pod["spec"].get("terminationGracePeriodSeconds", 30)
    assert spec["terminationGracePeriodSeconds"] == max(said, asked)
    agent = next(one for one in spec["initContainers"] if one["name"] == "keepstep-agent")
    told = {entry["name"]: entry.get("value") for entry in agent["env"]}
    assert told["KEEPSTEP_GRACE_SECONDS"] == str(max(said, asked))


@settings(PATIENT, max_examples=20)
@given(st.lists(pods(), min_size=5, max_size=5), st.sampled_from([one for one in KUBERNETES if one >= "1.32"]))
def test_kubernetes_takes_what_the_generator_makes_before_and_after(made: list[dict[str, Any]], version: str) -> None:
    outcomes = [(pod, inject(pod, InjectionDefaults(image=IMAGE))) for pod in made]
    mutated = [applied(pod, outcome) for pod, outcome in outcomes if isinstance(outcome, Mutation)]
    every = {"apiVersion": "v1", "kind": "PodList", "items": [*made, *mutated]}
    kubernetes_validate.validate(every, version, strict=True)


_MEDDLING = ("strip", "append", "prepend", "add", "shorten", "unmount", "drop", "resize")


def _meddle(how: str, pod: Any) -> None:
    """As other webhooks do between our two turns."""
    spec = pod["spec"]
    starting, running = spec["initContainers"], spec["containers"]
    everybody = [*starting, *running]
    ours = [one for one in everybody if one["name"] in ("keepstep-restore", "keepstep-agent")]
    match how:
        case "strip":
            for container in starting:
                container.pop("restartPolicy", None)
        case "append":
            starting.append({"name": "late-proxy", "image": "proxy", "restartPolicy": "Always"})
            running.append({"name": "late-logs", "image": "logs"})
        case "prepend":
            starting.insert(0, {"name": "early", "image": "early"})
        case "add":
            spec["volumes"].append({"name": "their-token", "emptyDir": {}})
            for container in everybody:
                container.setdefault("env", []).append({"name": "THEIRS", "value": "1"})
                container.setdefault("volumeMounts", []).append({"name": "their-token", "mountPath": "/theirs"})
        case "shorten":
            spec["terminationGracePeriodSeconds"] = 1
        case "unmount":
            for container in everybody:
                container["volumeMounts"] = []
        case "drop":
            for container in ours:
                container.pop("securityContext", None)
                container["env"] = container["env"][1:]
        case "resize":
            for container in ours:
                container["resources"] = {"limits": {"cpu": "1m", "ephemeral-storage": "1Gi"}}


@PATIENT
@given(st.data(), DEFAULTS)
def test_what_other_webhooks_took_comes_back_and_what_they_added_stays(
    data: st.DataObject, defaults: InjectionDefaults
) -> None:
    pod = data.draw(pods())
    outcome = inject(pod, defaults)
    if not isinstance(outcome, Mutation):
        return
    meddled = copy.deepcopy(applied(pod, outcome))
    for how in data.draw(st.lists(st.sampled_from(_MEDDLING), min_size=1, max_size=3, unique=True)):
        _meddle(how, meddled)
    again = inject(meddled, defaults)
    if isinstance(again, Refusal):
        # Without its mounts another directory of the user's may be what holds the checkpoints.
        event("refused")
        return
    assert isinstance(again, Mutation)
    mended = applied(meddled, again)
    assert_ours_are_last(mended)
    for container in [*mended["spec"]["initContainers"], *mended["spec"]["containers"]]:
        theirs = {"name": "THEIRS", "value": "1"}
        was = [
            one
            for one in [*meddled["spec"]["initContainers"], *meddled["spec"]["containers"]]
            if one["name"] == container["name"]
        ]
        if was and theirs in (was[0].get("env") or []):
            assert theirs in container["env"]
    once_more = inject(mended, defaults)
    assert isinstance(once_more, Mutation)
    assert once_more.patch == ()


@PATIENT
@given(odd_pods(), DEFAULTS)
def test_odd_annotations_are_answered_and_never_an_exception(pod: dict[str, Any], defaults: InjectionDefaults) -> None:
    outcome = inject(pod, defaults)
    event(type(outcome).__name__)
    assert isinstance(outcome, Mutation | Refusal | Skip)
    if isinstance(outcome, Mutation):
        assert_nothing_of_the_users_is_lost(pod, applied(pod, outcome))


@PATIENT
@given(st.one_of(garbage, broken_pods()))
def test_garbage_in_the_shape_of_a_pod_is_refused_and_never_an_exception(value: Any) -> None:
    outcome = mutate(value, Injection(destination="s3://bucket/run"), InjectionDefaults(image=IMAGE))
    event(type(outcome).__name__)
    if isinstance(outcome, Refusal):
        assert outcome.problems
    else:
        applied(value, outcome)


@PATIENT
@given(
    st.one_of(
        garbage,
        st.builds(lambda pod: {"request": {"uid": "u", "object": pod}}, st.one_of(garbage, broken_pods(), odd_pods())),
    ),
    st.sampled_from(FailurePolicy),
)
def test_every_review_gets_an_answer(review: Any, failure_policy: FailurePolicy) -> None:
    answered = answer(review, InjectionDefaults(image=IMAGE), failure_policy)
    event(answered.outcome)
    assert answered.outcome is not Outcome.FAILED, answered.fields
    response = answered.review["response"]
    assert isinstance(response["allowed"], bool)
    if not response["allowed"]:
        assert response["status"]["message"]
        assert failure_policy is FailurePolicy.FAIL or answered.outcome is Outcome.MALFORMED


_ITEMS = st.one_of(
    st.fixed_dictionaries({"name": st.sampled_from("abcd"), "value": st.integers(0, 2)}),
    st.integers(0, 3),
    st.booleans(),
)
_JSON = st.recursive(
    _ITEMS,
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(["a", "b/~", "c~1"]), inner, max_size=3)
    ),
    max_leaves=15,
)


@PATIENT
@given(_JSON, _JSON)
def test_a_difference_applied_to_the_one_is_the_other(before: Any, after: Any) -> None:
    assert jsonpatch.apply_patch(copy.deepcopy(before), list(difference(before, after))) == after
    assert list(difference(after, copy.deepcopy(after))) == []
