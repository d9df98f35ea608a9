"""What the files in `golden/` do not show: the second turn of a webhook, and single rules at their edges."""

import copy
from typing import Any

import pytest
from tests.injection.golden_pods import IMAGE
from tests.injection.promises import (
    OURS,
    assert_a_cluster_takes_it,
    assert_nothing_of_the_users_is_lost,
    assert_ours_are_last,
)
from tests.injection.small_pods import (
    ASKED,
    DEFAULTS,
    container,
    mutated,
    pod,
    problems,
    trainer,
    variables,
    without_nulls,
)

from keepstep_agent.core.injection.mutation import mutate
from keepstep_agent.core.injection.spec import Injection, InjectionDefaults, Mutation


class TestTheSecondTurn:
    """Kubernetes calls a webhook again when a later one changed the pod: reinvocationPolicy IfNeeded."""

    def test_a_restart_policy_that_another_webhook_stripped_comes_back(self) -> None:
        """Without it the pod would wait for ever for an init container that never ends."""
        once = mutated(pod())
        stripped = copy.deepcopy(once)
        del stripped["spec"]["initContainers"][-1]["restartPolicy"]
        outcome = mutate(stripped, ASKED, DEFAULTS)
        assert isinstance(outcome, Mutation)
        assert outcome.patch == ({"op": "add", "path": "/spec/initContainers/1/restartPolicy", "value": "Always"},)

    def test_a_sidecar_that_came_after_ours_goes_before_them(self) -> None:
        """Its network must be there when restore starts, and still be there while the agent drains."""
        once = mutated(pod())
        once["spec"]["initContainers"].append({"name": "istio-proxy", "image": "istio", "restartPolicy": "Always"})
        assert_ours_are_last(mutated(once))

    def test_an_identity_that_came_later_reaches_our_containers_too(self) -> None:
        once = mutated(pod())
        token = {"name": "aws-iam-token", "mountPath": "/var/run/secrets/eks", "readOnly": True}
        train = once["spec"]["containers"][0]
        train["env"].append({"name": "AWS_WEB_IDENTITY_TOKEN_FILE", "value": "/var/run/secrets/eks/token"})
        train["env"].append({"name": "AWS_ROLE_ARN", "value": "arn"})
        train["volumeMounts"].append(token)
        twice = mutated(once)
        for name in OURS:
            assert variables(twice, name)["AWS_ROLE_ARN"] == "arn"
            assert token in container(twice, name)["volumeMounts"]

    def test_a_token_on_the_checkpoints_own_volume_is_mounted_once(self) -> None:
        """The API server takes no container with two mounts at one path."""
        mount = {"name": "v", "mountPath": "/data"}
        token = {"name": "AWS_WEB_IDENTITY_TOKEN_FILE", "value": "/data/token"}
        before = pod(containers=[trainer(volumeMounts=[mount], env=[token])], volumes=[{"name": "v", "emptyDir": {}}])
        asked = Injection(destination="s3://bucket/run", run_as_user=1000, checkpoint_directory="/data/out")
        assert_a_cluster_takes_it(mutated(before, asked))

    def test_what_another_webhook_gave_to_all_containers_stays_with_ours(self) -> None:
        once = mutated(pod())
        proxy = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
        for one in [*once["spec"]["initContainers"], *once["spec"]["containers"]]:
            one["env"].append(proxy)
            one["stdin"] = False
            one.setdefault("securityContext", {})["procMount"] = "Default"
        assert mutated(once) == once

    def test_an_image_from_a_mirror_and_a_size_by_the_clusters_policy_are_not_taken_back(self) -> None:
        once = mutated(pod())
        sized = {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"cpu": "1", "memory": "2Gi"}}
        for one in once["spec"]["initContainers"]:
            one |= {"image": "mirror.example.com/keepstep:1", "imagePullPolicy": "Always", "resources": sized}
        assert mutated(once) == once

    def test_a_pod_of_an_older_keepstep_gets_this_ones_image(self) -> None:
        """Its template was copied from a pod that lived then."""
        old = mutated(pod(), defaults=InjectionDefaults(image="example.com/keepstep:0"))
        assert container(mutated(old), "keepstep-agent")["image"] == IMAGE

    def test_resources_that_were_taken_away_come_back(self) -> None:
        once = mutated(pod(containers=[trainer(resources={"requests": {"cpu": "1"}})]))
        for one in once["spec"]["initContainers"]:
            one["resources"] = {}
        assert container(mutated(once), "keepstep-agent")["resources"]["limits"]["memory"] == "256Mi"

    def test_what_is_not_ours_to_say_is_not_taken_back(self) -> None:
        once = mutated(pod())
        once["spec"]["terminationGracePeriodSeconds"] = 3600
        twice = mutated(once)
        assert twice["spec"]["terminationGracePeriodSeconds"] == 3600
        assert variables(twice, "keepstep-agent")["KEEPSTEP_GRACE_SECONDS"] == "3600"

    def test_a_pod_that_was_copied_from_a_living_one_gets_what_its_annotations_say_now(self) -> None:
        copied = mutated(mutated(pod()), Injection(destination="s3://bucket/other", run_as_user=1000))
        assert_ours_are_last(copied)
        assert variables(copied, "keepstep-agent")["KEEPSTEP_DESTINATION"] == "s3://bucket/other"

    def test_who_writes_our_annotation_by_hand_loses_nothing(self) -> None:
        """By that alone a volume of our name would be taken for ours, and be made anew."""
        claim = {"name": "keepstep-socket", "persistentVolumeClaim": {"claimName": "precious"}}
        before = pod(volumes=[claim], containers=[trainer(env=[{"name": "KEEPSTEP_VOLUME", "value": "/theirs"}])])
        before["metadata"]["annotations"] = {"keepstep.dev/injected": ""}
        found = problems(before)
        assert any("the pod already has keepstep-socket in its volumes" in problem for problem in found)
        assert any("the trainer sets KEEPSTEP_VOLUME '/theirs'" in problem for problem in found)


class TestTheTrainer:
    """Which container it is, where the annotation does not say it."""

    @pytest.mark.parametrize(
        ("containers", "chosen"),
        [
            (["main"], "main"),
            (["main", "istio-proxy"], "main"),
            (["linkerd-proxy", "main"], "main"),
            (["main", "pytorch"], "pytorch"),
            (["logs", "main"], "main"),
            (["trainer", "main"], "trainer"),
        ],
    )
    def test_it_is_the_only_one_or_has_a_usual_name_or_is_kubectls(self, containers: list[str], chosen: str) -> None:
        before = pod(containers=[{"name": name, "image": "example.com/image:1"} for name in containers])
        before["metadata"]["annotations"] = {"kubectl.kubernetes.io/default-container": "main"}
        after = mutated(before)
        assert [name for name in containers if "KEEPSTEP_VOLUME" in variables(after, name)] == [chosen]

    @pytest.mark.parametrize("containers", [["main", "logs"], ["node", "trainer"]])
    def test_otherwise_nobody_guesses(self, containers: list[str]) -> None:
        before = pod(containers=[{"name": name, "image": "example.com/image:1"} for name in containers])
        (problem,) = problems(before)
        assert problem.startswith(f"cannot tell which container trains ({', '.join(containers)})")

    def test_a_mesh_that_starts_after_restore_is_said(self) -> None:
        proxy = {"name": "istio-proxy", "image": "istio"}
        outcome = mutate(pod(containers=[trainer(), proxy]), ASKED, DEFAULTS)
        assert isinstance(outcome, Mutation)
        (warning,) = outcome.warnings
        assert "istio-proxy starts after restore, which then has no network" in warning


class TestVariables:
    """Of the trainer."""

    def test_ours_stand_before_the_users_that_may_refer_to_them(self) -> None:
        entry = {"name": "OUT", "value": "$(KEEPSTEP_CHECKPOINT_DIRECTORY)/x"}
        entries = mutated(pod(containers=[trainer(env=[entry])]))["spec"]["containers"][0]["env"]
        assert entries[-1] == entry
        assert [one["name"] for one in entries].index("KEEPSTEP_CHECKPOINT_DIRECTORY") < len(entries) - 1

    def test_of_two_entries_of_one_name_the_last_counts_as_it_does_for_kubelet(self) -> None:
        twice = [{"name": "KEEPSTEP_VOLUME", "value": "/other"}, {"name": "KEEPSTEP_VOLUME", "value": "/keepstep"}]
        before = pod(containers=[trainer(env=twice)])
        assert_nothing_of_the_users_is_lost(before, mutated(before))
        (problem,) = problems(pod(containers=[trainer(env=twice[::-1])]))
        assert "KEEPSTEP_VOLUME '/other'" in problem

    @pytest.mark.parametrize(("grace_seconds", "timeout"), [(20, "30"), (33, "30"), (300, "295")])
    def test_torchrun_gets_the_grace_period_less_a_little_and_never_less_than_its_own(
        self, grace_seconds: int, timeout: str
    ) -> None:
        asked = Injection(destination="s3://bucket/run", run_as_user=1000, grace_seconds=grace_seconds)
        told = variables(mutated(pod(terminationGracePeriodSeconds=10), asked), "train")
        assert told["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == timeout

    def test_an_empty_python_path_does_not_become_the_working_directory(self) -> None:
        asked = Injection(destination="s3://bucket/run", run_as_user=1000, autoload=True)
        before = pod(containers=[trainer(env=[{"name": "PYTHONPATH", "value": ""}])])
        assert variables(mutated(before, asked), "train")["PYTHONPATH"] == "/keepstep-autoload"

    def test_a_python_path_that_may_come_with_others_is_asked_for(self) -> None:
        """What `env` says counts more than what `envFrom` brings, which nobody sees before the pod runs."""
        asked = Injection(destination="s3://bucket/run", run_as_user=1000, autoload=True)
        outcome = mutate(pod(containers=[trainer(envFrom=[{"configMapRef": {"name": "c"}}])]), asked, DEFAULTS)
        assert isinstance(outcome, Mutation)
        (warning,) = outcome.warnings
        assert "if the trainer's image or envFrom has one of its own" in warning

    def test_a_variable_without_a_value_is_empty_text_as_it_is_for_kubelet(self) -> None:
        after = mutated(pod(containers=[trainer(env=[{"name": "KEEPSTEP_ATTEMPT"}])]))
        assert all({"name": "KEEPSTEP_ATTEMPT"} in container(after, name)["env"] for name in ("train", *OURS))
        (problem,) = problems(pod(containers=[trainer(env=[{"name": "KEEPSTEP_VOLUME"}])]))
        assert "the trainer sets KEEPSTEP_VOLUME '', and the injection would set it to /keepstep" in problem

    def test_an_attempt_of_the_users_own_is_the_agents_too(self) -> None:
        attempt = {"name": "KEEPSTEP_ATTEMPT", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['start']"}}}
        after = mutated(pod(containers=[trainer(env=[attempt])]))
        assert all(attempt in container(after, name)["env"] for name in ("train", *OURS))


class TestShape:
    """The API server sends pods; this is for everybody else."""

    @pytest.mark.parametrize(
        ("value", "problem"),
        [
            (None, "the pod is not an object"),
            ([], "the pod is not an object"),
            ({}, "the pod has no containers"),
            ({"spec": {"containers": []}}, "the pod has no containers"),
            ({"spec": {"containers": [1]}}, "the pod.spec.containers[0] is not an object"),
            ({"spec": {"containers": [{"env": {}}]}}, "the pod.spec.containers[0].env is not a list"),
            (
                {"spec": {"containers": [{"env": [{"value": 1}]}]}},
                "the pod.spec.containers[0].env[0].value is not a text",
            ),
            (
                {"spec": {"containers": [{}], "terminationGracePeriodSeconds": True}},
                "the pod.spec.terminationGracePeriodSeconds is not a whole number",
            ),
        ],
    )
    def test_what_is_no_pod_is_refused_with_the_place(self, value: Any, problem: str) -> None:
        assert problems(value)[0] == problem

    @pytest.mark.parametrize("containers", [[{}], [{}, {}]])
    def test_a_container_that_says_nothing_is_left_to_the_api_server(self, containers: list[Any]) -> None:
        """It refuses one without a name, with its own words; ours would have been none."""
        assert isinstance(mutate(pod(containers=containers), ASKED, DEFAULTS), Mutation)

    def test_null_is_the_same_as_nothing(self) -> None:
        before = pod(volumes=None, initContainers=None, terminationGracePeriodSeconds=None, securityContext=None)
        before["metadata"]["annotations"] = None
        before["spec"]["containers"] = [trainer(env=None, volumeMounts=None, resources=None, securityContext=None)]
        with_nulls, without = mutated(before), mutated(pod())
        with_nulls["spec"]["containers"] = [without_nulls(one) for one in with_nulls["spec"]["containers"]]
        assert without_nulls(with_nulls["spec"]) == without["spec"]
