"""What the files in `golden/` do not show: the second turn of a webhook, and single rules at their edges."""

import copy
import re
from pathlib import Path
from typing import Any

import jsonpatch
import pytest
from tests.injection.golden_pods import IMAGE
from tests.injection.promises import (
    OURS,
    assert_a_cluster_takes_it,
    assert_nothing_of_the_users_is_lost,
    assert_ours_are_last,
)

from mooring_agent.core.injection.quantity import parse_quantity
from mooring_agent.core.injection.spec import Injection, InjectionDefaults, Mutation, Refusal, Sidecar
from mooring_agent.core.pod_mutation import mutate

ROOT = Path(__file__).parents[2]
DEFAULTS = InjectionDefaults(image=IMAGE)
ASKED = Injection(destination="s3://bucket/run", run_as_user=1000)


def pod(**spec: Any) -> dict[str, Any]:
    containers = [{"name": "train", "image": "example.com/train:1"}]
    return {
        "metadata": {"generateName": "train-"},
        "spec": {"restartPolicy": "Never", "containers": containers, **spec},
    }


def trainer(**fields: Any) -> dict[str, Any]:
    return {"name": "train", "image": "example.com/train:1", **fields}


def mutated(before: dict[str, Any], asked: Injection = ASKED, defaults: InjectionDefaults = DEFAULTS) -> Any:
    outcome = mutate(before, asked, defaults)
    assert isinstance(outcome, Mutation), outcome
    return jsonpatch.apply_patch(copy.deepcopy(before), copy.deepcopy(list(outcome.patch)))


def problems(before: Any, asked: Injection = ASKED) -> tuple[str, ...]:
    outcome = mutate(before, asked, DEFAULTS)
    assert isinstance(outcome, Refusal), outcome
    return outcome.problems


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def container(of: Any, name: str) -> Any:
    spec = of["spec"]
    (found,) = [one for one in [*spec["initContainers"], *spec["containers"]] if one["name"] == name]
    return found


def variables(of: Any, name: str) -> dict[str, str]:
    return {entry["name"]: entry.get("value") for entry in container(of, name).get("env", [])}


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
        assert_ours_are_last(mutated(once), native=True)

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
            one |= {"image": "mirror.example.com/mooring:1", "imagePullPolicy": "Always", "resources": sized}
        assert mutated(once) == once

    def test_a_pod_of_an_older_mooring_gets_this_ones_image(self) -> None:
        """Its template was copied from a pod that lived then."""
        old = mutated(pod(), defaults=InjectionDefaults(image="example.com/mooring:0"))
        assert container(mutated(old), "mooring-agent")["image"] == IMAGE

    def test_resources_that_were_taken_away_come_back(self) -> None:
        once = mutated(pod())
        for one in once["spec"]["initContainers"]:
            one["resources"] = {}
        assert container(mutated(once), "mooring-agent")["resources"]["limits"]["memory"] == "256Mi"

    def test_what_is_not_ours_to_say_is_not_taken_back(self) -> None:
        once = mutated(pod())
        once["spec"]["terminationGracePeriodSeconds"] = 3600
        twice = mutated(once)
        assert twice["spec"]["terminationGracePeriodSeconds"] == 3600
        assert variables(twice, "mooring-agent")["MOORING_GRACE_SECONDS"] == "3600"

    def test_a_pod_that_was_copied_from_a_living_one_gets_what_its_annotations_say_now(self) -> None:
        native = mutated(pod())
        regular = mutated(native, Injection(destination="s3://bucket/other", sidecar=Sidecar.REGULAR, run_as_user=1000))
        assert_ours_are_last(regular, native=False)
        assert variables(regular, "mooring-agent")["MOORING_DESTINATION"] == "s3://bucket/other"
        assert "startupProbe" not in container(regular, "mooring-agent")

    def test_who_writes_our_annotation_by_hand_loses_nothing(self) -> None:
        """By that alone a volume of our name would be taken for ours, and be made anew."""
        claim = {"name": "mooring-socket", "persistentVolumeClaim": {"claimName": "precious"}}
        before = pod(volumes=[claim], containers=[trainer(env=[{"name": "MOORING_VOLUME", "value": "/theirs"}])])
        before["metadata"]["annotations"] = {"mooring.dev/injected": ""}
        found = problems(before)
        assert any("the pod has mooring-socket in its volumes already" in problem for problem in found)
        assert any("the trainer sets MOORING_VOLUME '/theirs'" in problem for problem in found)


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
        assert [name for name in containers if "MOORING_VOLUME" in variables(after, name)] == [chosen]

    @pytest.mark.parametrize("containers", [["main", "logs"], ["node", "trainer"]])
    def test_otherwise_nobody_guesses(self, containers: list[str]) -> None:
        before = pod(containers=[{"name": name, "image": "example.com/image:1"} for name in containers])
        (problem,) = problems(before)
        assert problem.startswith(f"which container trains? {', '.join(containers)}: name it")

    def test_a_mesh_that_starts_after_restore_is_said(self) -> None:
        proxy = {"name": "istio-proxy", "image": "istio"}
        outcome = mutate(pod(containers=[trainer(), proxy]), ASKED, DEFAULTS)
        assert isinstance(outcome, Mutation)
        (warning,) = outcome.warnings
        assert "istio-proxy starts after restore, which then has no network" in warning

    @pytest.mark.parametrize(
        ("fields", "seconds"),
        [
            ({}, "5"),
            ({"restartPolicy": "OnFailure"}, "330"),
            ({"restartPolicy": "Always"}, None),
            ({"restartPolicy": "Never", "restartPolicyRules": [{"action": "Restart"}]}, "330"),
        ],
    )
    def test_a_regular_sidecar_waits_as_long_as_the_trainer_itself_may_come_back(
        self, fields: dict[str, Any], seconds: str | None
    ) -> None:
        asked = Injection(destination="s3://bucket/run", run_as_user=1000, sidecar=Sidecar.REGULAR)
        told = variables(mutated(pod(containers=[trainer(**fields)]), asked), "mooring-agent")
        assert told.get("MOORING_EXIT_AFTER_TRAINER_SECONDS") == seconds


class TestVariables:
    """Of the trainer."""

    def test_ours_stand_before_the_users_that_may_refer_to_them(self) -> None:
        entry = {"name": "OUT", "value": "$(MOORING_CHECKPOINT_DIRECTORY)/x"}
        entries = mutated(pod(containers=[trainer(env=[entry])]))["spec"]["containers"][0]["env"]
        assert entries[-1] == entry
        assert [one["name"] for one in entries].index("MOORING_CHECKPOINT_DIRECTORY") < len(entries) - 1

    def test_of_two_entries_of_one_name_the_last_counts_as_it_does_for_kubelet(self) -> None:
        twice = [{"name": "MOORING_VOLUME", "value": "/other"}, {"name": "MOORING_VOLUME", "value": "/mooring"}]
        before = pod(containers=[trainer(env=twice)])
        assert_nothing_of_the_users_is_lost(before, mutated(before))
        (problem,) = problems(pod(containers=[trainer(env=twice[::-1])]))
        assert "MOORING_VOLUME '/other'" in problem

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
        assert variables(mutated(before, asked), "train")["PYTHONPATH"] == "/mooring-autoload"

    def test_a_python_path_that_may_come_with_others_is_asked_for(self) -> None:
        """What `env` says counts more than what `envFrom` brings, which nobody sees before the pod runs."""
        asked = Injection(destination="s3://bucket/run", run_as_user=1000, autoload=True)
        outcome = mutate(pod(containers=[trainer(envFrom=[{"configMapRef": {"name": "c"}}])]), asked, DEFAULTS)
        assert isinstance(outcome, Mutation)
        (warning,) = outcome.warnings
        assert "if the trainer's image or envFrom has one of its own" in warning

    def test_an_attempt_of_the_users_own_is_the_agents_too(self) -> None:
        attempt = {"name": "MOORING_ATTEMPT", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['start']"}}}
        after = mutated(pod(containers=[trainer(env=[attempt])]))
        assert all(attempt in container(after, name)["env"] for name in ("train", *OURS))


def is_guaranteed(of: Any) -> bool:
    """As Kubernetes finds it out: CPU and memory of every container, and requests that are limits."""
    spec = of["spec"]
    everybody = [*spec.get("initContainers", []), *spec["containers"]]
    resources = [one.get("resources", {}) for one in everybody]
    return all(
        found.get("limits", {}).get(name) and found.get("requests", found["limits"]).get(name) == found["limits"][name]
        for found in resources
        for name in ("cpu", "memory")
    )


class TestSecurity:
    """Of our containers."""

    def test_a_pod_that_pod_security_restricted_lets_in_stays_one(self) -> None:
        """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted"""
        strict = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        of_pod = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        asked = Injection(destination="pvc://claim/run", credentials="s3", autoload=True)
        after = mutated(pod(containers=[trainer(securityContext=strict)], securityContext=of_pod), asked)
        for one in [*after["spec"]["initContainers"], *after["spec"]["containers"]]:
            said = of_pod | one["securityContext"]
            assert said["allowPrivilegeEscalation"] is False
            assert said["capabilities"] == {"drop": ["ALL"]}
            assert said["runAsNonRoot"] is True
            assert said.get("runAsUser") != 0
            assert said["seccompProfile"]["type"] == "RuntimeDefault"
            assert not {"hostPort"} & {key for port in one.get("ports", []) for key in port}
        allowed = {
            "configMap",
            "csi",
            "downwardAPI",
            "emptyDir",
            "ephemeral",
            "persistentVolumeClaim",
            "projected",
            "secret",
        }
        assert all((volume.keys() - {"name"}) <= allowed for volume in after["spec"]["volumes"])

    @pytest.mark.parametrize(
        ("of_container", "of_pod", "annotation", "openshift", "user"),
        [
            ({"runAsUser": 1}, {"runAsUser": 2}, None, False, 1),
            ({}, {"runAsUser": 2}, None, False, 2),
            ({"runAsUser": None}, {"runAsUser": 2}, None, False, 2),
            ({}, {}, 3, False, 3),
            ({}, {}, 3, True, 3),
            ({}, {}, None, True, None),
            ({}, {}, None, False, 0),
            ({"runAsNonRoot": True}, {}, None, False, None),
            ({"runAsUser": 0}, {}, None, False, 0),
        ],
    )
    def test_our_user_is_the_trainers_as_far_as_anybody_says_it(
        self, of_container: Any, of_pod: Any, annotation: int | None, openshift: bool, user: int | None
    ) -> None:
        asked = Injection(destination="s3://bucket/run", run_as_user=annotation)
        before = pod(containers=[trainer(securityContext=of_container)], securityContext=of_pod)
        after = mutated(before, asked, InjectionDefaults(image=IMAGE, openshift=openshift))
        contexts = [container(after, name)["securityContext"] for name in OURS]
        assert [context.get("runAsUser") for context in contexts] == [user, user]
        non_root = bool(user) or bool(of_container.get("runAsNonRoot"))
        assert [context.get("runAsNonRoot", False) for context in contexts] == [non_root, non_root]


class TestResources:
    """Of ours, and what they do to the pod's."""

    def test_a_guaranteed_pod_stays_guaranteed(self) -> None:
        """With exclusive cores, which a pod of another class loses."""
        whole = {"requests": {"cpu": "8", "memory": "64Gi"}, "limits": {"cpu": "8", "memory": "64Gi"}}
        for sidecar in Sidecar:
            asked = Injection(destination="s3://bucket/run", run_as_user=1000, sidecar=sidecar)
            after = mutated(pod(containers=[trainer(resources=whole)]), asked)
            assert is_guaranteed(after)

    def test_requests_are_limits_so_a_guaranteed_pod_stays_guaranteed(self) -> None:
        for name in OURS:
            resources = container(mutated(pod()), name)["resources"]
            assert resources["requests"] == resources["limits"] == {"cpu": "500m", "memory": "256Mi"}

    def test_only_what_the_pod_itself_says_is_left_out(self) -> None:
        after = mutated(pod(resources={"limits": {"memory": "64Gi"}}))
        assert container(after, "mooring-agent")["resources"]["limits"] == {"cpu": "500m"}

    def test_the_smaller_of_both_limits_is_what_the_agent_must_know(self) -> None:
        limited = trainer(resources={"limits": {"ephemeral-storage": "100G"}})
        logs = {"name": "logs", "resources": {"limits": {"ephemeral-storage": "1G"}}}
        asked = Injection(destination="s3://bucket/run", run_as_user=1000, container="train")
        after = mutated(pod(containers=[limited, logs]), asked)
        assert variables(after, "mooring-agent")["MOORING_SIZE_LIMIT_BYTES"] == str(101 * 10**9)
        sized = Injection(destination="s3://bucket/run", run_as_user=1000, container="train", size_limit="50G")
        after = mutated(pod(containers=[limited, logs]), sized)
        assert variables(after, "mooring-agent")["MOORING_SIZE_LIMIT_BYTES"] == str(50 * 10**9)

    @pytest.mark.parametrize(
        ("starting", "own", "limit"),
        [
            ([("sidecar", "2G")], "", 2),
            ([("once", "2G")], "", 2),
            ([("sidecar", "2G")], "10G", 12),
            ([("once", "2G")], "10G", 10),
            ([("once", "20G")], "10G", 20),
            ([("sidecar", "2G"), ("once", "20G"), ("sidecar", "1G")], "10G", 22),
            ([("once", "")], "", None),
        ],
    )
    def test_kubelet_counts_the_limits_of_init_containers_too(
        self, starting: list[tuple[str, str]], own: str, limit: int | None
    ) -> None:
        """AggregateContainerLimits in k/k staging/src/k8s.io/component-helpers/resource/helpers.go: of a proxy's 2 GB
        alone a trainer's checkpoints would be evicted."""

        def limited(amount: str) -> dict[str, Any]:
            return {"resources": {"limits": {"ephemeral-storage": amount}}} if amount else {}

        before = pod(
            containers=[trainer(**limited(own))],
            initContainers=[
                {"name": f"i{at}", **limited(amount), **({"restartPolicy": "Always"} if kind == "sidecar" else {})}
                for at, (kind, amount) in enumerate(starting)
            ],
        )
        outcome = mutate(before, ASKED, DEFAULTS)
        assert isinstance(outcome, Mutation)
        after = mutated(before)
        told = variables(after, "mooring-agent").get("MOORING_SIZE_LIMIT_BYTES")
        assert told == (None if limit is None else str(limit * 10**9))
        assert any("ephemeral-storage limit" in warning for warning in outcome.warnings) == (limit is not None)
        assert mutated(after) == after

    def test_an_emptydir_in_memory_is_no_ephemeral_storage(self) -> None:
        limited = trainer(resources={"limits": {"ephemeral-storage": "100G"}})
        asked = Injection(destination="s3://bucket/run", run_as_user=1000, in_memory=True)
        told = variables(mutated(pod(containers=[limited]), asked), "mooring-agent")
        assert "MOORING_SIZE_LIMIT_BYTES" not in told
        assert told["MOORING_EVICTION_THRESHOLD_PERCENT"] == "0"

    @pytest.mark.parametrize(
        ("trainers", "requests", "limits"),
        [
            ({"limits": {"memory": "64Gi"}}, "64Gi", "64Gi"),
            ({"requests": {"memory": "8Gi"}, "limits": {"memory": "64Gi"}}, "8Gi", "64Gi"),
            ({"requests": {"memory": "8Gi"}}, "8Gi", None),
            ({}, "256Mi", None),
            ({"limits": {"memory": "128Mi"}}, "256Mi", "256Mi"),
        ],
    )
    def test_what_restore_writes_into_memory_may_be_as_much_as_the_trainers(
        self, trainers: dict[str, Any], requests: str, limits: str | None
    ) -> None:
        """The kernel counts it as restore's own, and would kill it for a checkpoint beyond its limit."""
        asked = Injection(destination="s3://bucket/run", run_as_user=1000, in_memory=True)
        after = mutated(pod(containers=[trainer(resources=trainers)]), asked)
        found = container(after, "mooring-restore")["resources"]
        assert (found["requests"]["memory"], found["limits"].get("memory")) == (requests, limits)
        assert found["requests"]["cpu"] == found["limits"]["cpu"] == "500m"
        assert container(after, "mooring-agent")["resources"]["limits"]["memory"] == "256Mi"
        on_disk = mutated(pod(containers=[trainer(resources=trainers)]))
        assert container(on_disk, "mooring-restore")["resources"]["limits"]["memory"] == "256Mi"

    def test_a_guaranteed_pod_stays_guaranteed_with_its_checkpoints_in_a_memory_of_its_own(self) -> None:
        whole = {"limits": {"cpu": "8", "memory": "64Gi"}}
        mount = {"name": "v", "mountPath": "/mooring"}
        containers = [trainer(resources=whole, volumeMounts=[mount])]
        after = mutated(pod(containers=containers, volumes=[{"name": "v", "emptyDir": {"medium": "Memory"}}]))
        assert is_guaranteed(after)
        assert container(after, "mooring-restore")["resources"]["limits"]["memory"] == "64Gi"


class TestPlaces:
    """Where checkpoints lie."""

    @pytest.mark.parametrize("kind", ["configMap", "secret", "projected", "downwardAPI", "image"])
    def test_a_volume_that_nobody_can_write_is_refused(self, kind: str) -> None:
        mount = {"name": "v", "mountPath": "/out"}
        asked = Injection(destination="s3://bucket/run", checkpoint_directory="/out")
        (problem,) = problems(pod(containers=[trainer(volumeMounts=[mount])], volumes=[{"name": "v", kind: {}}]), asked)
        assert f"a {kind}, to which nobody can write" in problem

    @pytest.mark.parametrize("path", ["/opt", "/opt/mooring/lib", "/usr", "/usr/local", "/etc", "/lib"])
    def test_a_volume_that_would_hide_our_own_program_is_refused(self, path: str) -> None:
        """It has the same path in agent and restore, which could not even start."""
        asked = Injection(destination="s3://bucket/run", checkpoint_directory=f"{path}/checkpoints")
        mount = {"name": "v", "mountPath": path}
        before = pod(containers=[trainer(volumeMounts=[mount])], volumes=[{"name": "v", "emptyDir": {}}])
        (problem,) = problems(before, asked)
        assert f"the volume v at {path} would hide " in problem
        (problem,) = problems(pod(), Injection(destination="s3://bucket/run", checkpoint_directory=path))
        assert f"the volume mooring-checkpoints at {path} would hide " in problem

    @pytest.mark.parametrize("path", ["/opt/ml/checkpoints", "/usr/src/app/out", "/optional", "/home"])
    def test_beside_our_own_program_there_is_room(self, path: str) -> None:
        asked = Injection(destination="s3://bucket/run", checkpoint_directory=path, run_as_user=1000)
        assert variables(mutated(pod(), asked), "train")["MOORING_VOLUME"] == path

    def test_our_image_is_where_volumes_must_not_be(self) -> None:
        text = (ROOT / "Dockerfile.agent").read_text()
        folders = re.findall(r"^COPY --from=build \S+ (/\S+)$", text, re.MULTILINE)
        assert folders
        for folder in folders:
            problems(pod(), Injection(destination="s3://bucket/run", checkpoint_directory=folder))

    @pytest.mark.parametrize("kind", ["persistentVolumeClaim", "nfs", "csi", "cephfs"])
    def test_a_volume_that_is_read_only_itself_is_refused(self, kind: str) -> None:
        mount = {"name": "v", "mountPath": "/out"}
        asked = Injection(destination="s3://bucket/run", checkpoint_directory="/out")
        volume = {"name": "v", kind: {"readOnly": True}}
        (problem,) = problems(pod(containers=[trainer(volumeMounts=[mount])], volumes=[volume]), asked)
        assert "which is read-only at /out: mount it writable" in problem

    def test_a_mount_without_its_volume_is_said(self) -> None:
        mount = {"name": "v", "mountPath": "/mooring"}
        (problem,) = problems(pod(containers=[trainer(volumeMounts=[mount])]))
        assert "the volume v, which the pod does not have: add it to spec.volumes" in problem

    def test_a_folder_whose_name_begins_alike_is_another_folder(self) -> None:
        mount = {"name": "v", "mountPath": "/out"}
        asked = Injection(destination="s3://bucket/run", checkpoint_directory="/output", run_as_user=1000)
        before = pod(containers=[trainer(volumeMounts=[mount])], volumes=[{"name": "v", "emptyDir": {}}])
        assert variables(mutated(before, asked), "train")["MOORING_VOLUME"] == "/output"

    @pytest.mark.parametrize(
        ("volume", "forgets"),
        [
            ({"emptyDir": {}}, False),
            ({"ephemeral": {}}, False),
            ({"persistentVolumeClaim": {"claimName": "c"}}, True),
            ({"nfs": {"server": "s", "path": "/"}}, True),
        ],
    )
    def test_only_on_a_volume_that_outlives_pods_an_old_notice_is_forgotten(
        self, volume: dict[str, Any], forgets: bool
    ) -> None:
        mount = {"name": "v", "mountPath": "/mooring"}
        after = mutated(pod(containers=[trainer(volumeMounts=[mount])], volumes=[{"name": "v", **volume}]))
        assert container(after, "mooring-agent")["args"] == (["agent", "--fresh"] if forgets else ["agent"])


class TestJobs:
    """Which pod of a job this is."""

    @pytest.mark.parametrize(
        ("labels", "annotations", "rank"),
        [
            ({}, {}, None),
            ({}, {"batch.kubernetes.io/job-completion-index": "4"}, "4"),
            ({"jobset.sigs.k8s.io/job-index": "2", "jobset.sigs.k8s.io/job-global-index": "5"}, {}, "2"),
            ({"jobset.sigs.k8s.io/job-index": "1"}, {"batch.kubernetes.io/job-completion-index": "0"}, "1"),
            ({"jobset.sigs.k8s.io/job-index": "0"}, {"batch.kubernetes.io/job-completion-index": "0"}, "0"),
            ({"training.kubeflow.org/replica-type": "master", "training.kubeflow.org/replica-index": "0"}, {}, "0"),
            ({"training.kubeflow.org/replica-type": "worker", "training.kubeflow.org/replica-index": "0"}, {}, "1"),
            (
                {
                    "training.kubeflow.org/replica-type": "worker",
                    "training.kubeflow.org/replica-index": "0",
                    "training.kubeflow.org/job-role": "master",
                },
                {},
                "0",
            ),
            (
                {
                    "training.kubeflow.org/replica-type": "worker",
                    "training.kubeflow.org/replica-index": "3",
                    "training.kubeflow.org/operator-name": "mpi-operator",
                },
                {},
                "3",
            ),
            ({"leaderworkerset.sigs.k8s.io/worker-index": "2", "apps.kubernetes.io/pod-index": "9"}, {}, "2"),
            ({"apps.kubernetes.io/pod-index": "9"}, {}, "9"),
            ({"jobset.sigs.k8s.io/job-index": "two"}, {}, None),
        ],
    )
    def test_a_pods_node_is_what_its_job_says(
        self, labels: dict[str, str], annotations: dict[str, str], rank: str | None
    ) -> None:
        before = pod()
        before["metadata"] |= {"labels": labels, "annotations": annotations}
        assert variables(mutated(before), "mooring-agent").get("MOORING_NODE_RANK") == rank

    @pytest.mark.parametrize(
        ("labels", "attempt"),
        [
            ({"jobset-uid": "a-b", "restart-attempt": "2"}, "a-b-2"),
            ({"jobset-name": "llama", "restart-attempt": "2"}, None),
            ({"jobset-uid": "a-b"}, None),
            ({"jobset-uid": "a/b", "restart-attempt": "2"}, None),
        ],
    )
    def test_an_attempt_needs_what_is_unique_to_it(self, labels: dict[str, str], attempt: str | None) -> None:
        before = pod()
        before["metadata"]["labels"] = {f"jobset.sigs.k8s.io/{key}": text for key, text in labels.items()}
        after = mutated(before)
        assert {variables(after, name).get("MOORING_ATTEMPT") for name in ("train", *OURS)} == {attempt}


class TestShape:
    """The API server sends pods; this is for everybody else."""

    @pytest.mark.parametrize(
        ("value", "problem"),
        [
            (None, "the pod is no object"),
            ([], "the pod is no object"),
            ({}, "the pod has no containers"),
            ({"spec": {"containers": []}}, "the pod has no containers"),
            ({"spec": {"containers": [1]}}, "the pod.spec.containers[0] is no object"),
            ({"spec": {"containers": [{"env": {}}]}}, "the pod.spec.containers[0].env is no list"),
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
        with_nulls["spec"]["containers"] = [_without_nulls(one) for one in with_nulls["spec"]["containers"]]
        assert _without_nulls(with_nulls["spec"]) == without["spec"]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("500m", 0.5),
        ("2", 2),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1Gi", 2**30),
        ("10G", 10**10),
        ("1e3", 1000),
        (2, 2),
        ("100n", 1e-7),
    ],
)
def test_a_quantity_is_what_kubernetes_makes_of_it(text: object, number: float) -> None:
    assert float(parse_quantity(text)) == pytest.approx(number)


@pytest.mark.parametrize("text", ["", "1GB", "Gi", "1 Gi", "1e999999999", "0x10", "1.2.3", True, None, [], "9" * 1000])
def test_what_is_no_quantity_is_refused_at_once(text: object) -> None:
    with pytest.raises(ValueError, match="is no quantity"):
        parse_quantity(text)
