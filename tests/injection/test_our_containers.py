"""Rights and resources of the containers that the injection adds."""

from typing import Any

import pytest
from tests.injection.golden_pods import IMAGE
from tests.injection.promises import OURS, class_of
from tests.injection.small_pods import ASKED, DEFAULTS, container, mutated, pod, trainer, variables

from keepstep_agent.core.injection.mutation import mutate
from keepstep_agent.core.injection.spec import Injection, InjectionDefaults, Mutation


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

    @pytest.mark.parametrize(
        ("of_trainer", "requests", "limits"),
        [
            ({}, {}, {}),
            ({"requests": {"nvidia.com/gpu": "8"}}, {}, {}),
            ({"requests": {"cpu": "8"}}, {"cpu": "250m", "memory": "256Mi"}, {"memory": "256Mi"}),
            ({"limits": {"memory": "64Gi"}}, {"cpu": "250m", "memory": "256Mi"}, {"memory": "256Mi"}),
            (
                {"requests": {"cpu": "4", "memory": "64Gi"}, "limits": {"cpu": "8", "memory": "64Gi"}},
                {"cpu": "250m", "memory": "256Mi"},
                {"memory": "256Mi"},
            ),
            (
                {"limits": {"cpu": "8", "memory": "64Gi"}},
                {"cpu": "500m", "memory": "256Mi"},
                {"cpu": "500m", "memory": "256Mi"},
            ),
            (
                {"requests": {"cpu": "8000m", "memory": "65536Mi"}, "limits": {"cpu": "8", "memory": "64Gi"}},
                {"cpu": "500m", "memory": "256Mi"},
                {"cpu": "500m", "memory": "256Mi"},
            ),
        ],
    )
    def test_cpu_has_a_limit_only_where_the_pods_class_wants_one_and_the_class_stays(
        self, of_trainer: dict[str, Any], requests: dict[str, str], limits: dict[str, str]
    ) -> None:
        """Guaranteed pods have exclusive cores; a limit elsewhere makes the drain slower than the node could."""
        before = pod(containers=[trainer(resources=of_trainer)])
        after = mutated(before)
        assert class_of(after) == class_of(before)
        for name in OURS:
            found = container(after, name).get("resources", {})
            assert (found.get("requests", {}), found.get("limits", {})) == (requests, limits)

    def test_what_somebody_asks_for_is_request_and_limit_in_every_class(self) -> None:
        asked = Injection(destination="s3://bucket/run", run_as_user=1000, cpu="2", memory="1Gi")
        for of_trainer in ({}, {"requests": {"cpu": "8"}}, {"limits": {"cpu": "8", "memory": "64Gi"}}):
            found = container(mutated(pod(containers=[trainer(resources=of_trainer)]), asked), "keepstep-agent")[
                "resources"
            ]
            assert found["requests"] == found["limits"] == {"cpu": "2", "memory": "1Gi"}

    def test_what_the_admin_decided_does_not_change_a_pods_class(self) -> None:
        defaults = InjectionDefaults(image=IMAGE, cpu="1", memory="512Mi")
        assert "resources" not in container(mutated(pod(), defaults=defaults), "keepstep-agent")
        before = pod(containers=[trainer(resources={"requests": {"cpu": "8"}})])
        found = container(mutated(before, defaults=defaults), "keepstep-agent")["resources"]
        assert found["requests"] == found["limits"] == {"cpu": "1", "memory": "512Mi"}

    def test_of_what_the_pod_as_a_whole_has_the_agent_takes_its_share(self) -> None:
        after = mutated(pod(resources={"limits": {"memory": "64Gi"}}))
        assert "resources" not in container(after, "keepstep-agent")

    def test_the_smaller_of_both_limits_is_what_the_agent_must_know(self) -> None:
        limited = trainer(resources={"limits": {"ephemeral-storage": "100G"}})
        logs = {"name": "logs", "resources": {"limits": {"ephemeral-storage": "1G"}}}
        asked = Injection(destination="s3://bucket/run", run_as_user=1000, container="train")
        after = mutated(pod(containers=[limited, logs]), asked)
        assert variables(after, "keepstep-agent")["KEEPSTEP_SIZE_LIMIT_BYTES"] == str(101 * 10**9)
        sized = Injection(destination="s3://bucket/run", run_as_user=1000, container="train", size_limit="50G")
        after = mutated(pod(containers=[limited, logs]), sized)
        assert variables(after, "keepstep-agent")["KEEPSTEP_SIZE_LIMIT_BYTES"] == str(50 * 10**9)

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
        told = variables(after, "keepstep-agent").get("KEEPSTEP_SIZE_LIMIT_BYTES")
        assert told == (None if limit is None else str(limit * 10**9))
        assert any("ephemeral-storage limit" in warning for warning in outcome.warnings) == (limit is not None)
        assert mutated(after) == after

    def test_an_emptydir_in_memory_is_no_ephemeral_storage(self) -> None:
        limited = trainer(resources={"limits": {"ephemeral-storage": "100G"}})
        asked = Injection(destination="s3://bucket/run", run_as_user=1000, in_memory=True)
        told = variables(mutated(pod(containers=[limited]), asked), "keepstep-agent")
        assert "KEEPSTEP_SIZE_LIMIT_BYTES" not in told
        assert told["KEEPSTEP_EVICTION_THRESHOLD_PERCENT"] == "0"

    @pytest.mark.parametrize(
        ("trainers", "requests", "limits"),
        [
            ({"limits": {"memory": "64Gi"}}, "64Gi", "64Gi"),
            ({"requests": {"memory": "8Gi"}, "limits": {"memory": "64Gi"}}, "8Gi", "64Gi"),
            ({"requests": {"memory": "8Gi"}}, "8Gi", None),
            ({"requests": {"cpu": "1"}}, "256Mi", None),
            ({"limits": {"memory": "128Mi"}}, "256Mi", "256Mi"),
        ],
    )
    def test_what_restore_writes_into_memory_may_be_as_much_as_the_trainers(
        self, trainers: dict[str, Any], requests: str, limits: str | None
    ) -> None:
        """The kernel counts it as restore's own, and would kill it for a checkpoint beyond its limit."""
        asked = Injection(destination="s3://bucket/run", run_as_user=1000, in_memory=True)
        after = mutated(pod(containers=[trainer(resources=trainers)]), asked)
        found = container(after, "keepstep-restore")["resources"]
        assert (found["requests"]["memory"], found["limits"].get("memory")) == (requests, limits)
        assert found["requests"]["cpu"] == "250m"
        assert container(after, "keepstep-agent")["resources"]["limits"]["memory"] == "256Mi"
        on_disk = mutated(pod(containers=[trainer(resources=trainers)]))
        assert container(on_disk, "keepstep-restore")["resources"]["limits"]["memory"] == "256Mi"

    def test_a_guaranteed_pod_stays_guaranteed_with_its_checkpoints_in_a_memory_of_its_own(self) -> None:
        whole = {"limits": {"cpu": "8", "memory": "64Gi"}}
        mount = {"name": "v", "mountPath": "/keepstep"}
        containers = [trainer(resources=whole, volumeMounts=[mount])]
        after = mutated(pod(containers=containers, volumes=[{"name": "v", "emptyDir": {"medium": "Memory"}}]))
        assert class_of(after) == "Guaranteed"
        assert container(after, "keepstep-restore")["resources"]["limits"]["memory"] == "64Gi"
