"""Answers an AdmissionReview of the API server, following the failure policy.

Owns the form of the answer and ensures that there always is one. A pod that cannot be injected is refused or let
through, as the admin decided; either way its author can read why. The `webhook` package does the HTTP.
"""

import base64
import json
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, assert_never

from keepstep_agent.core.injection.annotations import read_annotations
from keepstep_agent.core.injection.json_patch import difference
from keepstep_agent.core.injection.mutation import mutate
from keepstep_agent.core.injection.pod import present, shape_problems
from keepstep_agent.core.injection.spec import (
    FailurePolicy,
    InjectionDefaults,
    Mutation,
    Refusal,
    Skip,
)
from keepstep_api.names import ANNOTATION_SKIPPED

_UNPROCESSABLE: Final = 422
_INTERNAL_ERROR: Final = 500
_BAD_REQUEST: Final = 400
_LONGEST_REASON: Final = 1000


class Outcome(StrEnum):
    """The result of a review."""

    INJECTED = "injected"
    UNCHANGED = "unchanged"
    """The pod has everything already."""
    SKIPPED = "skipped"
    """The pod does not ask for the injection."""
    REFUSED = "refused"
    LET_THROUGH = "let-through"
    """The pod asks for the injection, cannot have it, and runs without it."""
    FAILED = "failed"
    """Keepstep has a bug. The pod is refused or let through as well."""
    MALFORMED = "malformed"
    """The body is no AdmissionReview."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`review` goes back to the API server; `fields` go to the log."""

    review: dict[str, Any]
    outcome: Outcome
    fields: Mapping[str, Any]


def answer(review: Any, defaults: InjectionDefaults, failure_policy: FailurePolicy) -> Answer:
    """Answer one review. `review` is any JSON. Never raises."""
    request = _object(review, "request")
    uid = request.get("uid")
    if not isinstance(uid, str) or not uid:
        # Without the right uid the API server applies its own failure policy.
        message = "this is not an AdmissionReview: it has no request with a uid"
        response = {"uid": "", "allowed": False, "status": {"code": _BAD_REQUEST, "message": message}}
        fields = {"outcome": Outcome.MALFORMED, "reason": message}
        return Answer(review=_review(response), outcome=Outcome.MALFORMED, fields=fields)
    pod = request.get("object")
    try:
        answered = _answered(uid, request, pod, defaults, failure_policy)
    except Exception as error:
        # A bug of ours must not do more harm than a webhook that is down.
        problem = f"a bug in Keepstep, {type(error).__name__}: {error}: please report it"
        answered = _refused(uid, pod, (problem,), failure_policy, code=_INTERNAL_ERROR)
        answered = replace(answered, outcome=Outcome.FAILED, fields={"traceback": traceback.format_exc()})
    return replace(answered, fields={**_fields(request), "outcome": answered.outcome, **answered.fields})


def _answered(
    uid: str, request: Mapping[str, Any], pod: Any, defaults: InjectionDefaults, failure_policy: FailurePolicy
) -> Answer:
    result = _result(request, pod, defaults)
    match result:
        case Skip():
            patch, warnings = (_skip_patch(pod, result.reason), (result.reason,)) if result.warning else ((), ())
            return _allowed(uid, Outcome.SKIPPED, patch, warnings, {"reason": result.reason})
        case Refusal():
            return _refused(uid, pod, result.problems, failure_policy, code=_UNPROCESSABLE)
        case Mutation():
            outcome = Outcome.INJECTED if result.patch else Outcome.UNCHANGED
            fields = {"warnings": result.warnings} if result.warnings else {}
            return _allowed(uid, outcome, result.patch, result.warnings, fields)
        case _:
            assert_never(result)


def _result(request: Mapping[str, Any], pod: Any, defaults: InjectionDefaults) -> Mutation | Skip | Refusal:
    if request.get("operation", "CREATE") != "CREATE" or request.get("subResource"):
        return Skip(reason="Keepstep changes a pod only when it is created")
    annotations = _annotations(pod)
    asked = read_annotations(annotations, defaults)
    if isinstance(asked, Skip) and not asked.warning:
        # Its shape does not matter: it does not ask for the injection.
        return asked
    if problems := shape_problems(pod):
        return Refusal(problems=problems)
    return asked if isinstance(asked, Skip | Refusal) else mutate(pod, asked, defaults)


def _refused(uid: str, pod: Any, problems: tuple[str, ...], failure_policy: FailurePolicy, *, code: int) -> Answer:
    fields = {"problems": problems}
    if failure_policy is FailurePolicy.IGNORE:
        warnings = tuple(f"this pod runs without Keepstep: {problem}" for problem in problems)
        return _allowed(uid, Outcome.LET_THROUGH, _skip_patch(pod, "; ".join(problems)), warnings, fields)
    reason = "InternalError" if code == _INTERNAL_ERROR else "Invalid"
    status = {"code": code, "reason": reason, "message": "keepstep cannot be injected: " + "; ".join(problems)}
    response = {"uid": uid, "allowed": False, "status": status}
    return Answer(review=_review(response), outcome=Outcome.REFUSED, fields=fields)


def _allowed(uid: str, outcome: Outcome, patch: Any, warnings: tuple[str, ...], fields: Mapping[str, Any]) -> Answer:
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(json.dumps(list(patch)).encode()).decode()
    if warnings:
        response["warnings"] = [f"keepstep: {warning}" for warning in warnings]
    return Answer(review=_review(response), outcome=outcome, fields=fields)


def _review(response: Mapping[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": dict(response)}


def _skip_patch(pod: Any, reason: str) -> tuple[dict[str, Any], ...]:
    """Return a patch that writes the reason into an annotation; empty if the pod has no valid shape."""
    if shape_problems(pod):
        return ()
    metadata = present(pod, "metadata", {})
    annotations = {**present(metadata, "annotations", {}), ANNOTATION_SKIPPED: reason[:_LONGEST_REASON]}
    return tuple(difference(pod, {**pod, "metadata": {**metadata, "annotations": annotations}}))


def _annotations(pod: Any) -> dict[str, str]:
    """Return the annotations whose values are strings. `pod` is any JSON."""
    annotations = _object(_object(pod, "metadata"), "annotations")
    return {key: text for key, text in annotations.items() if isinstance(text, str)}


def _object(holder: Any, key: str) -> Mapping[str, Any]:
    """Return the object at `key`; empty if there is none. `holder` is any JSON."""
    found = holder.get(key) if isinstance(holder, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _fields(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return log fields that identify the pod. It often has no name yet, only a generateName."""
    named = _object(_object(request, "object"), "metadata")
    return {
        "uid": request["uid"],
        "namespace": str(request.get("namespace", "")),
        "pod": str(request.get("name") or named.get("generateName", "")),
        "dry_run": bool(request.get("dryRun")),
    }
