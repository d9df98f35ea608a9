"""The answer to a review under both failure policies: what the API server does with it, and what its author reads."""

import base64
import json
from typing import Any

import jsonpatch
import pytest

from keepstep_agent.core.injection import admission_review
from keepstep_agent.core.injection.admission_review import Answer, Outcome, answer
from keepstep_agent.core.injection.spec import FailurePolicy, InjectionDefaults

DEFAULTS = InjectionDefaults(image="example.com/keepstep:1")


def review(pod: Any, **request: Any) -> dict[str, Any]:
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {"uid": "u-1", "operation": "CREATE", "namespace": "team", "object": pod, **request},
    }


def pod(**annotations: str) -> dict[str, Any]:
    said = {f"keepstep.dev/{name}": text for name, text in annotations.items()}
    containers = [{"name": "train", "image": "example.com/train:1"}]
    metadata = {"generateName": "train-", "annotations": said}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": containers}}


GOOD = pod(inject="true", destination="s3://bucket/run")
BAD = pod(inject="true", destination="bucket", keep_last="3")


def answered(of: Any, policy: FailurePolicy = FailurePolicy.FAIL) -> tuple[Answer, Any]:
    found = answer(of, DEFAULTS, policy)
    assert found.review["apiVersion"] == "admission.k8s.io/v1"
    assert found.review["kind"] == "AdmissionReview"
    json.dumps(found.review)
    json.dumps(found.fields)
    return found, found.review["response"]


def patch(response: Any) -> Any:
    assert response["patchType"] == "JSONPatch"
    return json.loads(base64.b64decode(response["patch"]))


@pytest.mark.parametrize("policy", FailurePolicy)
def test_a_pod_that_asks_gets_its_patch_and_warnings(policy: FailurePolicy) -> None:
    found, response = answered(review(GOOD), policy)
    assert found.outcome is Outcome.INJECTED
    assert (response["uid"], response["allowed"]) == ("u-1", True)
    assert {operation["op"] for operation in patch(response)} == {"add"}
    (warning,) = response["warnings"]
    assert warning.startswith("keepstep: the trainer's user is unknown")
    assert found.fields["namespace"] == "team"
    assert found.fields["pod"] == "train-"


def test_under_fail_a_pod_that_cannot_be_injected_is_refused_with_every_reason() -> None:
    found, response = answered(review(BAD))
    assert found.outcome is Outcome.REFUSED
    assert response == {
        "uid": "u-1",
        "allowed": False,
        "status": {
            "code": 422,
            "reason": "Invalid",
            "message": "keepstep cannot be injected: there is no annotation keepstep.dev/keep_last: "
            "did you mean keepstep.dev/keep-last?; keepstep.dev/destination: 'bucket' is not a destination: "
            "write s3://bucket/prefix or pvc://claim/path",
        },
    }


def test_under_ignore_it_runs_without_and_says_so_on_itself_and_to_its_author() -> None:
    found, response = answered(review(BAD), FailurePolicy.IGNORE)
    assert found.outcome is Outcome.LET_THROUGH
    assert response["allowed"] is True
    assert all(warning.startswith("keepstep: this pod runs without Keepstep: ") for warning in response["warnings"])
    assert len(response["warnings"]) == 2
    (operation,) = patch(response)
    assert operation["path"] == "/metadata/annotations/keepstep.dev~1skipped"
    assert "'bucket' is not a destination" in operation["value"]


def test_a_pod_that_asks_for_nothing_is_none_of_our_business_whatever_it_looks_like() -> None:
    for of in ({"metadata": {"annotations": {"a": "b"}}, "spec": {"containers": "?"}}, pod(), None, 3):
        found, response = answered(review(of))
        assert found.outcome is Outcome.SKIPPED
        assert response == {"uid": "u-1", "allowed": True}


def test_a_pod_that_was_switched_off_is_left_alone_without_a_word() -> None:
    _, response = answered(review(pod(inject="false")))
    assert response == {"uid": "u-1", "allowed": True}


def test_a_pod_that_forgot_to_ask_is_warned_and_marked() -> None:
    found, response = answered(review(pod(destination="s3://bucket/run")))
    assert found.outcome is Outcome.SKIPPED
    assert "nothing is injected without keepstep.dev/inject" in response["warnings"][0]
    (operation,) = patch(response)
    assert operation["path"] == "/metadata/annotations/keepstep.dev~1skipped"


def test_a_pod_that_has_everything_gets_no_patch() -> None:
    once = jsonpatch.apply_patch(GOOD, patch(answered(review(GOOD))[1]))
    found, response = answered(review(once))
    assert found.outcome is Outcome.UNCHANGED
    assert "patch" not in response


def test_what_is_not_a_pods_creation_is_let_alone() -> None:
    for of in (review(GOOD, operation="UPDATE"), review(GOOD, subResource="ephemeralcontainers")):
        assert answered(of)[1] == {"uid": "u-1", "allowed": True}


@pytest.mark.parametrize("of", [None, [], {}, {"request": None}, {"request": {"uid": 3}}, {"request": {"uid": ""}}])
@pytest.mark.parametrize("policy", FailurePolicy)
def test_what_is_no_review_gets_an_answer_that_no_api_server_takes_for_one(of: Any, policy: FailurePolicy) -> None:
    found, response = answered(of, policy)
    assert found.outcome is Outcome.MALFORMED
    assert response["uid"] == ""
    assert response["allowed"] is False
    assert response["status"]["code"] == 400


@pytest.mark.parametrize(("policy", "allowed"), [(FailurePolicy.FAIL, False), (FailurePolicy.IGNORE, True)])
def test_a_mistake_of_our_own_is_answered_by_the_policy_and_told_to_the_log(
    policy: FailurePolicy, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("here")

    monkeypatch.setattr(admission_review, "mutate", broken)
    found, response = answered(review(GOOD), policy)
    assert found.outcome is Outcome.FAILED
    assert response["allowed"] is allowed
    said = response["warnings"][0] if allowed else response["status"]["message"]
    assert "a bug in Keepstep, ZeroDivisionError: here" in said
    assert "in broken" in found.fields["traceback"]
