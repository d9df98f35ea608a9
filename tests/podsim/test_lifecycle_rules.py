"""The simulator starts, restarts and judges containers as kubelet does, and volumes live as long as they should."""

from typing import Any

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.podsim.errors import UnsupportedError
from tests.podsim.node import Node
from tests.podsim.phase import Phase
from tests.podsim.shell_pods import FOREVER, HEARS, container, pod, sidecar
from tests.podsim.timeline import What


def test_init_containers_run_one_after_the_other_and_a_sidecars_probe_holds_up_what_follows(node: Node) -> None:
    probe = {"exec": {"command": ["test", "-e", "/data/open"]}, "periodSeconds": 1, "failureThreshold": 60}
    init = [
        container("first", "sleep 0.3; echo first >> /data/order"),
        sidecar("agent", f"echo agent >> /data/order; sleep 1; touch /data/open; {HEARS}", startupProbe=probe),
    ]
    made = node.run(pod(container("trainer", "echo trainer >> /data/order; cat /data/order"), init=init))
    assert made.wait_ended(HANG_SECONDS) is Phase.SUCCEEDED
    assert made.log("trainer").split() == ["first", "agent", "trainer"]
    line = made.timeline
    assert line.at(What.EXITED, "first") <= line.at(What.STARTED, "agent")
    assert line.seconds_between((What.STARTED, "agent"), (What.STARTED, "trainer")) >= 1


def test_a_sidecar_whose_probe_fails_too_often_is_killed_and_started_again(node: Node) -> None:
    asked = {"command": ["test", "-e", "/data/second"]}
    probe = {"exec": asked, "periodSeconds": 1, "failureThreshold": 2, "timeoutSeconds": 60}
    script = f"test -e /data/first && touch /data/second; touch /data/first; {HEARS}"
    made = node.run(pod(container("trainer", "true"), init=[sidecar("agent", script, startupProbe=probe)]))
    assert made.wait_ended(HANG_SECONDS) is Phase.SUCCEEDED
    # More often where it takes its time before it has made the file.
    assert made.container("agent").start_count >= 2
    assert made.timeline.all(What.PROBE_FAILED, "agent")


@pytest.mark.parametrize(
    ("policy", "script", "phase", "starts"),
    [
        ("Never", "exit 3", Phase.FAILED, 1),
        ("Never", "exit 0", Phase.SUCCEEDED, 1),
        ("OnFailure", "exit 0", Phase.SUCCEEDED, 1),
        # What an emptyDir holds is still there for the next start.
        ("OnFailure", "echo . >> /data/starts; test $(wc -l < /data/starts) -ge 3", Phase.SUCCEEDED, 3),
    ],
)
def test_a_trainer_is_started_again_as_the_policy_says_and_the_sidecar_and_the_volume_stay(
    node: Node, policy: str, script: str, phase: Phase, starts: int
) -> None:
    made = node.run(pod(container("trainer", script), init=[sidecar("agent", HEARS)], restartPolicy=policy))
    assert made.wait_ended(HANG_SECONDS) is phase
    assert made.container("trainer").start_count == starts
    assert made.container("agent").start_count == 1
    assert not made.volume("data").exists()


def test_each_restart_waits_twice_as_long_as_the_one_before_but_the_first_comes_at_once(node: Node) -> None:
    made = node.run(pod(container("trainer", "exit 1"), restartPolicy="OnFailure"))
    made.wait(lambda: made.container("trainer").start_count == 4, HANG_SECONDS, "the fourth start")
    starts = [one.at for one in made.timeline.all(What.STARTED, "trainer")]
    second, third = starts[2] - starts[1], starts[3] - starts[2]
    assert second >= 0.2
    assert third >= 0.4
    assert made.phase is Phase.RUNNING


@pytest.mark.parametrize("policy", ["Never", "OnFailure"])
def test_a_native_sidecar_is_started_again_whatever_the_policy(node: Node, policy: str) -> None:
    made = node.run(pod(container("trainer", HEARS), init=[sidecar("agent", HEARS)], restartPolicy=policy))
    made.wait_started("trainer", HANG_SECONDS)
    made.out_of_memory("agent")
    made.wait(lambda: made.container("agent").start_count == 2, HANG_SECONDS, "the agent is back")
    assert made.container("trainer").start_count == 1
    assert made.phase is Phase.RUNNING


def test_a_regular_sidecar_keeps_the_pod_running_and_its_code_counts(node: Node) -> None:
    made = node.run(
        pod(container("trainer", "exit 0"), container("agent", "until test -e /data/go; do sleep 0.1; done; exit 75"))
    )
    made.wait(lambda: bool(made.container("trainer").endings), HANG_SECONDS, "the trainer's end")
    made.wait_started("agent", HANG_SECONDS)
    assert made.phase is Phase.RUNNING
    assert not made.ended
    (made.volume("data") / "go").touch()
    assert made.wait_ended(HANG_SECONDS) is Phase.FAILED


def test_an_init_container_that_fails_ends_a_pod_that_never_restarts_before_it_began(node: Node) -> None:
    init = [sidecar("agent", HEARS), container("restore", "exit 1")]
    made = node.run(pod(container("trainer", "true"), init=init))
    assert made.wait_ended(HANG_SECONDS) is Phase.FAILED
    assert not made.container("trainer").start_count


def test_an_init_container_that_fails_is_tried_again_elsewhere(node: Node) -> None:
    init = [container("restore", "test -e /data/seen || { touch /data/seen; exit 1; }")]
    made = node.run(pod(container("trainer", "true"), init=init, restartPolicy="OnFailure"))
    assert made.wait_ended(HANG_SECONDS) is Phase.SUCCEEDED
    assert made.container("restore").start_count == 2


def test_a_pod_is_pending_until_its_regular_containers_have_begun(node: Node) -> None:
    made = node.run(
        pod(container("trainer", HEARS), init=[container("restore", "until test -e /data/go; do sleep 0.1; done")])
    )
    made.wait_started("restore", HANG_SECONDS)
    phases = [made.phase]
    (made.volume("data") / "go").touch()
    made.wait_started("trainer", HANG_SECONDS)
    phases.append(made.phase)
    assert phases == [Phase.PENDING, Phase.RUNNING]


def test_a_claim_outlives_the_pod_and_an_empty_dir_does_not(short_directory: Any, node: Node) -> None:
    claim = short_directory / "claim"
    claim.mkdir(mode=0o777)
    claim.chmod(0o777)
    with Node(short_directory / "m", images=node.images, claims={"disk": claim}, namespaces=node.namespaces) as other:
        volumes = [
            {"name": "data", "persistentVolumeClaim": {"claimName": "disk"}},
            {"name": "scratch", "emptyDir": {}},
        ]
        mounts = [{"name": "data", "mountPath": "/data"}, {"name": "scratch", "mountPath": "/scratch"}]
        first = container("trainer", "echo kept > /data/kept; echo lost > /scratch/lost", volumeMounts=mounts)
        assert other.run(pod(first, volumes=volumes)).wait_ended(HANG_SECONDS) is Phase.SUCCEEDED
        second = container("trainer", "cat /data/kept; ls /scratch", volumeMounts=mounts)
        made = other.run(pod(second, volumes=volumes))
        assert made.wait_ended(HANG_SECONDS) is Phase.SUCCEEDED
        assert made.log("trainer").split() == ["kept"]


def test_what_the_simulator_does_not_play_is_refused(node: Node) -> None:
    refused: list[dict[str, Any]] = [{"livenessProbe": {}}, {"lifecycle": {"postStart": {}}}, {"volumeDevices": []}]
    for fields in refused:
        with pytest.raises(UnsupportedError):
            node.run(pod(container("trainer", "true", **fields)))


def test_at_the_end_of_its_context_nothing_of_a_pod_is_left(node: Node) -> None:
    with node.run(pod(container("trainer", f'trap "" TERM; {FOREVER}'), init=[sidecar("agent", HEARS)])) as made:
        made.wait_started("trainer", HANG_SECONDS)
        processes = [made.container(name).process for name in ("trainer", "agent")]
    assert not made.volume("data").exists()
    for process in processes:
        assert process is not None
        assert process.exit_code() == 137
        assert process.members() == []
