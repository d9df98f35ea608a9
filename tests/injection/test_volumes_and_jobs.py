"""Where the checkpoints lie in a pod, and which place the pod has in its job."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.injection.promises import (
    OURS,
)
from tests.injection.small_pods import (
    ASKED,
    container,
    mutated,
    pod,
    problems,
    trainer,
    variables,
)

from keepstep_agent.core.injection.spec import Injection

ROOT = Path(__file__).parents[2]
_WORKLOAD = "kueue.x-k8s.io/workload"
_JOBSET = "jobset.sigs.k8s.io/"
_LWS = "leaderworkerset.sigs.k8s.io/"


class TestPlaces:
    """Where checkpoints lie."""

    @pytest.mark.parametrize("kind", ["configMap", "secret", "projected", "downwardAPI", "image"])
    def test_a_volume_that_nobody_can_write_is_refused(self, kind: str) -> None:
        mount = {"name": "v", "mountPath": "/out"}
        asked = Injection(destination="s3://bucket/run", checkpoint_directory="/out")
        (problem,) = problems(pod(containers=[trainer(volumeMounts=[mount])], volumes=[{"name": "v", kind: {}}]), asked)
        assert f"a {kind}, to which nobody can write" in problem

    @pytest.mark.parametrize("path", ["/opt", "/opt/keepstep/lib", "/usr", "/usr/local", "/etc", "/lib"])
    def test_a_volume_that_would_hide_our_own_program_is_refused(self, path: str) -> None:
        """It has the same path in agent and restore, which could not even start."""
        asked = Injection(destination="s3://bucket/run", checkpoint_directory=f"{path}/checkpoints")
        mount = {"name": "v", "mountPath": path}
        before = pod(containers=[trainer(volumeMounts=[mount])], volumes=[{"name": "v", "emptyDir": {}}])
        (problem,) = problems(before, asked)
        assert f"the volume v at {path} would hide " in problem
        (problem,) = problems(pod(), Injection(destination="s3://bucket/run", checkpoint_directory=path))
        assert f"the volume keepstep-checkpoints at {path} would hide " in problem

    @pytest.mark.parametrize("path", ["/run", "/var/run", "/var", "/run/secrets", "/var/run/secrets/more"])
    def test_a_volume_over_the_agents_own_mounts_or_tokens_is_refused(self, path: str) -> None:
        """Whoever may rename what a mount lies on can take it off, also from within another container."""
        asked = Injection(destination="s3://bucket/run", checkpoint_directory=f"{path}/checkpoints")
        mount = {"name": "v", "mountPath": path}
        before = pod(containers=[trainer(volumeMounts=[mount])], volumes=[{"name": "v", "emptyDir": {}}])
        (problem,) = problems(before, asked)
        assert problem.startswith(f"the volume v at {path} ")
        assert problem.endswith("mount it elsewhere, or choose another keepstep.dev/checkpoint-directory")

    @pytest.mark.parametrize("path", ["/opt/keepstep/home", "/keepstep-state", "/keepstep-autoload", "/run/keepstep/x"])
    def test_a_volume_with_the_trainers_token_over_the_agents_own_is_refused(self, path: str) -> None:
        token = {"name": "AWS_WEB_IDENTITY_TOKEN_FILE", "value": f"{path}/token"}
        mount = {"name": "v", "mountPath": path}
        before = pod(containers=[trainer(volumeMounts=[mount], env=[token])], volumes=[{"name": "v", "emptyDir": {}}])
        (problem,) = problems(before)
        assert problem.startswith(f"the volume v at {path} ")
        assert problem.endswith("and the trainer's identity lies on it: mount it elsewhere")

    @pytest.mark.parametrize("path", ["/opt/ml/checkpoints", "/usr/src/app/out", "/optional", "/home"])
    def test_beside_our_own_program_there_is_room(self, path: str) -> None:
        asked = Injection(destination="s3://bucket/run", checkpoint_directory=path, run_as_user=1000)
        assert variables(mutated(pod(), asked), "train")["KEEPSTEP_VOLUME"] == path

    def test_our_image_is_where_volumes_must_not_be(self) -> None:
        text = (ROOT / "Dockerfile.agent").read_text()
        folders = re.findall(r"^COPY --from=build \S+ (/\S+)$", text, re.MULTILINE)
        assert folders
        for folder in folders:
            problems(pod(), Injection(destination="s3://bucket/run", checkpoint_directory=folder))
        (home,) = re.findall(r"^ENV .*\bHOME=(\S+)", text, re.MULTILINE)
        problems(pod(), Injection(destination="s3://bucket/run", checkpoint_directory=home))
        assert f"mkdir --mode=0555 {home}\n" in text

    @pytest.mark.parametrize("kind", ["persistentVolumeClaim", "nfs", "csi", "cephfs"])
    def test_a_volume_that_is_read_only_itself_is_refused(self, kind: str) -> None:
        mount = {"name": "v", "mountPath": "/out"}
        asked = Injection(destination="s3://bucket/run", checkpoint_directory="/out")
        volume = {"name": "v", kind: {"readOnly": True}}
        (problem,) = problems(pod(containers=[trainer(volumeMounts=[mount])], volumes=[volume]), asked)
        assert "which is read-only at /out: mount it writable" in problem

    def test_a_mount_without_its_volume_is_said(self) -> None:
        mount = {"name": "v", "mountPath": "/keepstep"}
        (problem,) = problems(pod(containers=[trainer(volumeMounts=[mount])]))
        assert "the volume v, which the pod does not have: add it to spec.volumes" in problem

    def test_a_folder_whose_name_begins_alike_is_another_folder(self) -> None:
        mount = {"name": "v", "mountPath": "/out"}
        asked = Injection(destination="s3://bucket/run", checkpoint_directory="/output", run_as_user=1000)
        before = pod(containers=[trainer(volumeMounts=[mount])], volumes=[{"name": "v", "emptyDir": {}}])
        assert variables(mutated(before, asked), "train")["KEEPSTEP_VOLUME"] == "/output"

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
        mount = {"name": "v", "mountPath": "/keepstep"}
        after = mutated(pod(containers=[trainer(volumeMounts=[mount])], volumes=[{"name": "v", **volume}]))
        assert container(after, "keepstep-agent")["args"] == (["agent", "--fresh"] if forgets else ["agent"])


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
        assert variables(mutated(before), "keepstep-agent").get("KEEPSTEP_NODE_RANK") == rank

    @pytest.mark.parametrize(
        ("labels", "more", "attempt", "place"),
        [
            (
                {f"{_JOBSET}jobset-uid": "a-b", f"{_JOBSET}restart-attempt": "2"}
                | {f"{_JOBSET}replicatedjob-name": "node", f"{_JOBSET}job-index": "1"}
                # Counted for each Job of the set: its other pods go on.
                | {f"{_JOBSET}job-restart-attempt": "5"},
                {"annotations": {"batch.kubernetes.io/job-completion-index": "3"}},
                "a-b-2",
                "node-1-3",
            ),
            (
                {f"{_JOBSET}jobset-uid": "a-b", f"{_JOBSET}restart-attempt": "2"}
                | {f"{_JOBSET}replicatedjob-name": "node", f"{_JOBSET}job-index": "0"},
                {"annotations": {f"{_JOBSET}execution-attempt": "7"}},
                "a-b-2-7",
                "node-0-0",
            ),
            ({f"{_JOBSET}jobset-name": "llama", f"{_JOBSET}restart-attempt": "2"}, {}, None, None),
            ({f"{_JOBSET}jobset-uid": "a/b", f"{_JOBSET}restart-attempt": "2"}, {}, None, None),
            (
                {"batch.kubernetes.io/controller-uid": "c-d", "batch.kubernetes.io/job-completion-index": "4"},
                {"annotations": {"batch.kubernetes.io/job-index-failure-count": "2"}},
                "c-d",
                "4",
            ),
            (
                {f"{_LWS}name": "llama", f"{_LWS}group-index": "0", f"{_LWS}worker-index": "3"},
                {},
                "llama-group-0",
                "0-3",
            ),
            (
                {"training.kubeflow.org/replica-type": "worker", "training.kubeflow.org/replica-index": "0"},
                {"ownerReferences": [{"kind": "PyTorchJob", "uid": "e-f", "controller": True}]},
                "e-f",
                "worker-0",
            ),
            (
                {"apps.kubernetes.io/pod-index": "9"},
                {"ownerReferences": [{"kind": "StatefulSet", "uid": "g-h", "controller": True}]},
                "g-h",
                "9",
            ),
            # Pods without places: of a Job without indexes, and of a Deployment.
            ({"batch.kubernetes.io/controller-uid": "c-d"}, {}, None, None),
            ({}, {"ownerReferences": [{"kind": "ReplicaSet", "uid": "i-j", "controller": True}]}, None, None),
            ({}, {}, None, None),
        ],
    )
    def test_a_job_and_a_pods_place_in_it_are_what_its_launcher_says(
        self, labels: dict[str, str], more: dict[str, Any], attempt: str | None, place: str | None
    ) -> None:
        before = pod()
        annotations = {**before["metadata"].get("annotations", {}), **more.get("annotations", {})}
        before["metadata"] |= {**more, "labels": labels, "annotations": annotations}
        after = mutated(before)
        assert {variables(after, name).get("KEEPSTEP_ATTEMPT") for name in ("train", *OURS)} == {attempt}
        assert {variables(after, name).get("KEEPSTEP_PLACE") for name in OURS} == {place}

    def test_all_pods_of_a_jobset_of_several_jobs_have_numbers_of_their_own(self) -> None:
        found: dict[str | None, str | None] = {}
        for job, completion in product(range(3), range(4)):
            before = pod()
            before["metadata"]["labels"] = {
                f"{_JOBSET}job-index": str(job),
                f"{_JOBSET}replicatedjob-name": "node",
                f"{_JOBSET}replicatedjob-replicas": "3",
                f"{_JOBSET}jobset-uid": "a-b",
                f"{_JOBSET}restart-attempt": "0",
            }
            before["metadata"]["annotations"] = {"batch.kubernetes.io/job-completion-index": str(completion)}
            given = variables(mutated(before), "keepstep-agent")
            found[given["KEEPSTEP_NODE_RANK"]] = given["KEEPSTEP_PLACE"]
        assert sorted(int(rank or "") for rank in found) == list(range(12))
        assert len(set(found.values())) == 12
        assert found["0"] == "node-0-0"

    @pytest.mark.parametrize(
        ("more", "job_uid"),
        [
            ({"labels": {f"{_JOBSET}jobset-uid": "a-b", "batch.kubernetes.io/controller-uid": "c-d"}}, "a-b"),
            ({"labels": {"batch.kubernetes.io/controller-uid": "c-d"}}, "c-d"),
            ({"ownerReferences": [{"kind": "PyTorchJob", "uid": "e-f", "controller": True}]}, "e-f"),
            ({}, None),
        ],
    )
    def test_an_agent_that_tells_kueue_knows_the_uid_of_its_job(
        self, more: dict[str, Any], job_uid: str | None
    ) -> None:
        before = pod()
        before["metadata"] |= more
        tells = {"KEEPSTEP_CLUSTER_EVENTS": "true"}
        asked = replace(ASKED, settings={**tells, "KEEPSTEP_PRIORITY_BOOST": "100"})
        assert variables(mutated(before, asked), "keepstep-agent").get("KEEPSTEP_JOB_UID") == job_uid
        asked = replace(ASKED, settings=tells)
        assert "KEEPSTEP_JOB_UID" not in variables(mutated(before, asked), "keepstep-agent")

    @pytest.mark.parametrize(
        ("more", "name"),
        [
            ({"annotations": {_WORKLOAD: "trainjob-a-b1c2"}, "labels": {_WORKLOAD: "other"}}, "trainjob-a-b1c2"),
            ({"labels": {_WORKLOAD: "trainjob-a-b1c2"}}, "trainjob-a-b1c2"),
            ({"annotations": {_WORKLOAD: "no,name=of anything"}}, None),
            ({}, None),
        ],
    )
    def test_an_agent_that_tells_kueue_knows_the_workload_that_its_pod_names(
        self, more: dict[str, Any], name: str | None
    ) -> None:
        before = pod()
        before["metadata"] |= more
        asked = replace(ASKED, settings={"KEEPSTEP_CLUSTER_EVENTS": "true", "KEEPSTEP_PRIORITY_BOOST": "100"})
        assert variables(mutated(before, asked), "keepstep-agent").get("KEEPSTEP_WORKLOAD_NAME") == name

    @pytest.mark.parametrize(("group", "worker", "late"), [("1", "0", "group-index"), ("0", "1", "worker-index")])
    def test_labels_that_another_webhook_writes_after_ours_change_nothing(
        self, group: str, worker: str, late: str
    ) -> None:
        """LeaderWorkerSet numbers leaders' groups and workers in its own webhook, and the order is that of names."""
        labels = {f"{_LWS}name": "llama", f"{_LWS}group-index": group, f"{_LWS}worker-index": worker}
        before = pod()
        before["metadata"] |= {
            "labels": {**labels, "apps.kubernetes.io/pod-index": "1"},
            "ownerReferences": [{"kind": "StatefulSet", "uid": "g-h", "controller": True}],
        }
        whole = mutated(before)
        del before["metadata"]["labels"][f"{_LWS}{late}"]
        early = mutated(before)
        early["metadata"]["labels"][f"{_LWS}{late}"] = labels[f"{_LWS}{late}"]
        assert mutated(early) == early
        assert early["spec"] == whole["spec"]
        assert variables(whole, "keepstep-agent")["KEEPSTEP_PLACE"] == f"{group}-{worker}"
        assert variables(whole, "train")["KEEPSTEP_ATTEMPT"] == f"llama-group-{group}"
