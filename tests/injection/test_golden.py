"""Every pod in `golden/`: the outcome is what its file says, and what a cluster would take."""

import copy
from typing import Any

import jsonpatch
import kubernetes_validate
import pytest
from tests.injection import golden_pods as golden
from tests.injection.api_server import stored
from tests.injection.promises import (
    assert_nobody_else_has_what_is_the_agents,
    assert_nothing_of_the_users_is_lost,
)

from keepstep_agent.core.injection.spec import Mutation

CASES = list(golden.cases())
MUTATIONS = [(case, outcome) for case in CASES if isinstance(outcome := case.outcome(), Mutation)]


def mutated(case: golden.Case, outcome: Mutation) -> Any:
    return jsonpatch.apply_patch(copy.deepcopy(case.pod), list(outcome.patch))


def name_of(value: object) -> str | None:
    return value.path.stem if isinstance(value, golden.Case) else ""


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_pods_outcome_is_what_its_file_says(case: golden.Case) -> None:
    """After a change that is meant: python -m tests.injection.golden, and look at every line that changed."""
    assert case.why
    assert golden.described(case) == case.made


@pytest.mark.parametrize("version", golden.KUBERNETES)
def test_kubernetes_takes_every_pod_before_and_after(version: str) -> None:
    """As one list: the schemas are read once then. What only later versions know is left out."""
    pods = [mutated(case, outcome) for case, outcome in MUTATIONS if version in case.versions]
    # Restricted by nothing of ours, so what a version refuses here our files have wrong.
    pods += [case.pod for case in CASES if version in case.versions]
    assert len(pods) >= 3
    kubernetes_validate.validate({"apiVersion": "v1", "kind": "PodList", "items": pods}, version, strict=True)


@pytest.mark.parametrize(("case", "outcome"), MUTATIONS, ids=name_of)
def test_a_mutated_pod_has_everything_of_the_users_and_needs_nothing_more(case: golden.Case, outcome: Mutation) -> None:
    pod = mutated(case, outcome)
    assert_nothing_of_the_users_is_lost(case.pod, pod)
    assert_nobody_else_has_what_is_the_agents(pod)
    again = golden.inject(pod, case.defaults)
    assert isinstance(again, Mutation)
    assert again.patch == ()
    assert set(again.warnings) <= set(outcome.warnings)


@pytest.mark.parametrize(("case", "outcome"), MUTATIONS, ids=name_of)
def test_an_injected_pod_as_an_api_server_stores_it_needs_nothing_more(case: golden.Case, outcome: Mutation) -> None:
    """Else every pod counts as injected twice, and the API server asks everybody once more."""
    pod = stored(case.pod)
    injected = golden.inject(pod, case.defaults)
    assert isinstance(injected, Mutation)
    kept = stored(jsonpatch.apply_patch(pod, list(injected.patch)))
    assert stored(kept) == kept
    again = golden.inject(kept, case.defaults)
    assert isinstance(again, Mutation)
    assert again.patch == ()


def test_there_are_pods_enough_of_every_kind() -> None:
    kinds = [next(iter(golden.described(case))) for case in CASES]
    assert kinds.count("warnings") >= 25
    assert kinds.count("refused") >= 10
    assert kinds.count("skipped") >= 3
