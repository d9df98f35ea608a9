"""Where a program writes that knows nothing of Keepstep: the trainer's mounts, and what restore and agent watch."""

import copy
from typing import Any

import jsonpatch
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from tests.injection.golden_pods import inject
from tests.injection.pods import pods
from tests.injection.promises import OURS, assert_a_cluster_takes_it
from tests.injection.small_pods import DEFAULTS, container, mutated, pod, problems, trainer, variables

from keepstep_agent.config import load_settings
from keepstep_agent.core.injection.spec import Injection, Mutation
from keepstep_api.names import ENV_ATTEMPT

CLAIM = {"name": "work", "persistentVolumeClaim": {"claimName": "work"}}


def asked(*output: str, **said: Any) -> Injection:
    return Injection(destination="s3://bucket/run", run_as_user=1000, output=output, **said)


def watched(of: Any, name: str) -> tuple[str, ...]:
    """What restore or agent make of their variables. Raises ConfigurationError where they would not start."""
    # An attempt that the pod gives itself may be anything.
    told = {key: value for key, value in variables(of, name).items() if value is not None and key != ENV_ATTEMPT}
    return load_settings(flags={}, environment=told).watch


def mounts(of: Any, name: str) -> dict[str, str | None]:
    """The subPath at each path that the checkpoints' volume has."""
    return {one["mountPath"]: one.get("subPath") for one in container(of, name)["volumeMounts"] if _is_data(one)}


def _is_data(mount: dict[str, Any]) -> bool:
    return mount["name"] in ("keepstep-checkpoints", "work")


def test_a_program_writes_into_the_volume_and_the_agent_watches_it_whole() -> None:
    after = mutated(pod(), asked("/workspace/out", "/logs"))
    assert mounts(after, "train") == {"/keepstep": None, "/workspace/out": "out", "/logs": "logs"}
    for name in OURS:
        assert mounts(after, name) == {"/keepstep": None}
        assert watched(after, name) == ("/keepstep/checkpoints", "/keepstep/out", "/keepstep/logs")


def test_the_users_own_volume_holds_the_output_too() -> None:
    before = pod(containers=[trainer(volumeMounts=[{"name": "work", "mountPath": "/data"}])], volumes=[CLAIM])
    after = mutated(before, asked("/workspace/out", checkpoint_directory="/data/checkpoints"))
    assert mounts(after, "train") == {"/data": None, "/workspace/out": "out"}
    assert watched(after, "keepstep-agent") == ("/data/checkpoints", "/data/out")


@pytest.mark.parametrize(
    ("output", "watch", "expected"),
    [
        ((), True, ("/keepstep/checkpoints",)),
        ((), False, ()),
        (("/out",), False, ("/keepstep/out",)),
    ],
)
def test_the_checkpoint_directory_is_watched_unless_that_is_off(
    output: tuple[str, ...], watch: bool, expected: tuple[str, ...]
) -> None:
    after = mutated(pod(), asked(*output, watch=watch))
    assert {watched(after, name) for name in OURS} == {expected}
    assert ("KEEPSTEP_WATCH" in variables(after, "keepstep-agent")) == (bool(output) or not watch)


def test_only_the_container_that_trains_gets_the_directory() -> None:
    before = pod(containers=[trainer(), {"name": "logs", "image": "example.com/logs:1"}])
    after = mutated(before, asked("/out", container="train"))
    assert "volumeMounts" not in container(after, "logs")


def test_a_mount_that_another_webhook_took_comes_back_once() -> None:
    once = mutated(pod(), asked("/out"))
    unmounted = copy.deepcopy(once)
    unmounted["spec"]["containers"][0]["volumeMounts"] = []
    assert mounts(mutated(unmounted, asked("/out")), "train") == mounts(once, "train")
    assert mutated(once, asked("/out")) == once


def test_a_pod_copied_from_an_injected_one_may_write_elsewhere() -> None:
    after = mutated(mutated(pod(), asked("/out")), asked("/runs"))
    assert watched(after, "keepstep-agent") == ("/keepstep/checkpoints", "/keepstep/runs")


def test_a_copied_pods_output_is_not_where_checkpoints_can_go() -> None:
    """There the trainer has a folder of the volume, and its checkpoints could not be linked."""
    (problem,) = problems(mutated(pod(), asked("/out")), asked(checkpoint_directory="/out/checkpoints"))
    assert "on the volume keepstep-checkpoints, of which /out is a subPath" in problem


@pytest.mark.parametrize(
    ("output", "checkpoints", "problem"),
    [
        ("/keepstep", "", "checkpoints lie on the volume keepstep-checkpoints at /keepstep, and "),
        ("/keepstep/out", "", "give it as keepstep.dev/checkpoint-directory instead"),
        ("/keepstep/checkpoints", "", "lies in the checkpoint directory /keepstep/checkpoints: leave it out"),
        ("/keepstep/checkpoints/a", "", "lies in the checkpoint directory /keepstep/checkpoints: leave it out"),
        ("/data", "/data/runs/checkpoints", "would put its directories into the checkpoint directory"),
        ("/a/checkpoints", "", "/keepstep/checkpoints on the volume, and the checkpoint directory"),
        ("/a/runs", "/keepstep/runs/now", "and the checkpoint directory /keepstep/runs/now has that name too"),
        (
            "/a/now",
            "/keepstep/runs/now",
            "choose another keepstep.dev/checkpoint-directory, such as /keepstep/announced",
        ),
    ],
)
def test_output_and_checkpoints_must_not_be_in_each_other(output: str, checkpoints: str, problem: str) -> None:
    (found,) = problems(pod(), asked(output, checkpoint_directory=checkpoints))
    assert problem in found
    assert "keepstep.dev/output" in found


def test_a_volume_within_the_output_is_refused() -> None:
    before = pod(containers=[trainer(volumeMounts=[{"name": "work", "mountPath": "/out/data"}])], volumes=[CLAIM])
    (found,) = problems(before, asked("/out", checkpoint_directory="/out/data/checkpoints"))
    assert found == (
        "checkpoints lie on the volume work at /out/data, inside keepstep.dev/output /out: "
        "choose another keepstep.dev/checkpoint-directory"
    )


@pytest.mark.parametrize(
    ("mount", "problem"),
    [
        (
            {"mountPath": "/out"},
            "where keepstep.dev/output /out/runs lies: give /out/runs as keepstep.dev/checkpoint-d",
        ),
        ({"mountPath": "/out/runs/"}, "the trainer mounts work at /out/runs, where keepstep.dev/output /out/runs lies"),
        ({"mountPath": "/out/runs", "subPath": "runs"}, "where keepstep.dev/output /out/runs lies"),
        ({"mountPath": "/out/runs/a/b"}, "inside keepstep.dev/output /out/runs: mount yours elsewhere"),
    ],
)
def test_where_another_volume_is_the_output_cannot_be(mount: dict[str, Any], problem: str) -> None:
    before = pod(containers=[trainer(volumeMounts=[{"name": "work", **mount}])], volumes=[CLAIM])
    (found,) = problems(before, asked("/out/runs"))
    assert problem in found


@pytest.mark.parametrize("path", ["/output", "/out/run", "/ou"])
def test_beside_another_mount_there_is_room_for_output(path: str) -> None:
    before = pod(containers=[trainer(volumeMounts=[{"name": "work", "mountPath": "/out/runs"}])], volumes=[CLAIM])
    assert mounts(mutated(before, asked(path)), "train")[path] == path.rpartition("/")[2]


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ({}, False),
        ({"readOnly": True}, True),
        ({"subPath": "other"}, True),
        ({"subPath": None}, True),
        ({"subPathExpr": "out"}, True),
    ],
)
def test_a_user_may_mount_the_directory_just_as_we_would(said: dict[str, Any], refused: bool) -> None:
    mine = {"name": "work", "mountPath": "/workspace/out", "subPath": "out", **said}
    whole = {"name": "work", "mountPath": "/data"}
    before = pod(containers=[trainer(volumeMounts=[whole, mine])], volumes=[CLAIM])
    wanted = asked("/workspace/out", checkpoint_directory="/data/checkpoints")
    if refused:
        (found,) = problems(before, wanted)
        assert found.startswith("the trainer mounts work at /workspace/out, where keepstep.dev/output")
    else:
        assert mounts(mutated(before, wanted), "train") == {"/data": None, "/workspace/out": "out"}


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much], max_examples=100)
@given(pods(), st.sampled_from(["/runs", "/logs:/workspace/b"]))
def test_restore_and_agent_can_start_with_what_they_are_told(before: dict[str, Any], output: str) -> None:
    annotations = before["metadata"]["annotations"]
    annotations["keepstep.dev/output"] = output
    # Most others are the whole volume.
    annotations.pop("keepstep.dev/checkpoint-directory", None)
    outcome = inject(before, DEFAULTS)
    event(type(outcome).__name__)
    if not isinstance(outcome, Mutation):
        return
    after = jsonpatch.apply_patch(copy.deepcopy(before), copy.deepcopy(list(outcome.patch)))
    assert_a_cluster_takes_it(after)
    (told,) = {watched(after, name) for name in OURS}
    volume = variables(after, "keepstep-agent")["KEEPSTEP_VOLUME"]
    whole = container(after, "keepstep-agent")["volumeMounts"]
    train = container(after, annotations["keepstep.dev/container"])
    for path in output.split(":"):
        (mount,) = [one for one in train["volumeMounts"] if one["mountPath"].rstrip("/") == path]
        assert {"name": mount["name"], "mountPath": volume} in whole
        assert f"{volume}/{mount['subPath']}" in told
