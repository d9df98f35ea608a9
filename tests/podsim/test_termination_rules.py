"""The simulator ends pods as kubelet does. The seconds are those seen on a real 1.36 kubelet."""

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.podsim import termination
from tests.podsim.node import Node
from tests.podsim.phase import Phase
from tests.podsim.pod import Pod
from tests.podsim.shell_pods import DEAF, FOREVER, HEARS, container, leaves_after, pod, pre_stop, sidecar
from tests.podsim.timeline import What

LONG_SECONDS = 3600
"""A grace period, or a hook, that nobody waits for the end of."""


def started(node: Node, manifest: dict[str, object], *names: str) -> Pod:
    """Running, with its traps set."""
    made = node.run(manifest)
    for name in names or ("trainer", "agent"):
        made.wait_started(name, HANG_SECONDS)
        made.wait(lambda name=name: "up" in made.log(name), HANG_SECONDS, f"{name} is up")  # type: ignore[misc]
    return made


def test_at_deletion_hook_and_the_trainers_signal_come_at_once_and_the_sidecars_signal_after_the_trainers_exit(
    node: Node,
) -> None:
    hooked = sidecar("agent", HEARS, lifecycle=pre_stop("echo told > /data/told"))
    # It would not leave if the hook came after it.
    trainer = container("trainer", leaves_after(1, waits_for="/data/told"))
    made = started(node, pod(trainer, init=[hooked], terminationGracePeriodSeconds=LONG_SECONDS))
    made.delete()
    assert made.wait_ended(HANG_SECONDS) is Phase.SUCCEEDED
    line = made.timeline
    assert line.at(What.EXITED, "trainer") <= line.at(What.SIGTERM, "agent")
    assert line.seconds_between((What.SIGTERM, "trainer"), (What.SIGTERM, "agent")) >= 1


def test_a_trainer_that_uses_up_its_grace_leaves_the_sidecar_two_seconds(node: Node) -> None:
    made = started(
        node, pod(container("trainer", DEAF), init=[sidecar("agent", DEAF)], terminationGracePeriodSeconds=3)
    )
    made.delete()
    assert made.wait_ended(HANG_SECONDS) is Phase.FAILED
    line = made.timeline
    for name in ("trainer", "agent"):
        assert made.container(name).endings[-1].exit_code == 137
    assert line.seconds_between(What.DELETED, (What.SIGKILL, "trainer")) >= 3
    assert line.seconds_between((What.SIGTERM, "agent"), (What.SIGKILL, "agent")) >= 2
    assert (line.seconds_left("trainer"), line.seconds_left("agent")) == (3, 2)


def test_the_time_of_the_hook_is_deducted(node: Node) -> None:
    slow = container("trainer", DEAF, lifecycle=pre_stop("sleep 2"))
    made = started(node, pod(slow, terminationGracePeriodSeconds=4), "trainer")
    made.delete()
    made.wait_ended(HANG_SECONDS)
    assert made.timeline.seconds_left("trainer") == 2
    assert made.timeline.seconds_between(What.DELETED, (What.SIGKILL, "trainer")) >= 4


def test_after_a_hook_that_takes_all_the_time_there_is_two_seconds_remain(node: Node) -> None:
    slow = container("trainer", DEAF, lifecycle=pre_stop(f"sleep {LONG_SECONDS}"))
    made = started(node, pod(slow, terminationGracePeriodSeconds=2), "trainer")
    made.delete()
    made.wait_ended(HANG_SECONDS)
    line = made.timeline
    assert line.seconds_between(What.DELETED, (What.SIGTERM, "trainer")) >= 2
    assert line.seconds_between((What.SIGTERM, "trainer"), (What.SIGKILL, "trainer")) >= 2
    assert line.seconds_left("trainer") == 2


def test_sidecars_are_ended_in_reverse_order(node: Node) -> None:
    init = [sidecar("network", HEARS), sidecar("agent", leaves_after(0.5))]
    manifest = pod(container("trainer", HEARS), init=init, terminationGracePeriodSeconds=LONG_SECONDS)
    made = started(node, manifest, "trainer", "agent", "network")
    made.delete()
    made.wait_ended(HANG_SECONDS)
    line = made.timeline
    assert line.at(What.EXITED, "trainer") <= line.at(What.SIGTERM, "agent")
    assert line.at(What.EXITED, "agent") <= line.at(What.SIGTERM, "network")


def test_regular_containers_hear_their_signal_together(node: Node) -> None:
    # It would not leave before the other has heard of the end.
    trainer = container("trainer", leaves_after(0, waits_for="/data/heard"))
    agent = container("agent", f'trap "touch /data/heard; exit 0" TERM; echo up; {FOREVER}')
    made = started(node, pod(trainer, agent, terminationGracePeriodSeconds=LONG_SECONDS))
    made.delete()
    made.wait_ended(HANG_SECONDS)
    assert made.timeline.at(What.SIGTERM, "agent") < made.timeline.at(What.EXITED, "trainer")


def test_an_eviction_leaves_the_trainer_two_seconds_and_the_sidecar_one_more(node: Node) -> None:
    hooked = sidecar("agent", DEAF, lifecycle=pre_stop("true"))
    made = started(node, pod(container("trainer", DEAF), init=[hooked], terminationGracePeriodSeconds=60))
    made.evict()
    assert made.wait_ended(HANG_SECONDS) is Phase.FAILED
    assert made.reason == "Evicted"
    line = made.timeline
    assert line.at(What.PRE_STOP, "agent") < line.at(What.SIGTERM, "agent")
    assert line.seconds_between(What.EVICTED, (What.SIGTERM, "agent")) >= 1
    assert line.seconds_between(What.EVICTED, (What.SIGKILL, "trainer")) >= 2
    assert line.seconds_between(What.EVICTED, (What.SIGKILL, "agent")) >= 3
    assert (line.seconds_left("trainer"), line.seconds_left("agent")) == (2, 2)


def test_at_an_eviction_the_sidecar_hears_its_signal_although_the_trainer_still_runs(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more time for the trainer, so that a busy machine is not late for it."""
    monkeypatch.setattr(termination, "MINIMUM_GRACE_SECONDS", LONG_SECONDS)
    trainer = container("trainer", leaves_after(0, waits_for="/data/heard"))
    agent = sidecar("agent", f'trap "touch /data/heard; exit 0" TERM; echo up; {FOREVER}', lifecycle=pre_stop("true"))
    made = started(node, pod(trainer, init=[agent], terminationGracePeriodSeconds=60))
    made.evict()
    made.wait_ended(HANG_SECONDS)
    assert made.timeline.at(What.SIGTERM, "agent") < made.timeline.at(What.EXITED, "trainer")


def test_a_restart_in_place_gives_all_containers_two_seconds_and_no_pre_stop_and_begins_with_init(node: Node) -> None:
    restore = container("restore", "echo restore >> /data/order")
    agent = sidecar("agent", DEAF, lifecycle=pre_stop("true"))
    made = started(node, pod(container("trainer", HEARS), init=[restore, agent], terminationGracePeriodSeconds=60))
    made.restart_in_place()
    made.wait(lambda: made.log("trainer").count("up") == 2, HANG_SECONDS, "the trainer begins again")
    line = made.timeline
    assert (line.seconds_left("trainer"), line.seconds_left("agent")) == (2, 2)
    assert line.at(What.SIGTERM, "agent") < line.at(What.SIGKILL, "agent")
    assert not line.all(What.PRE_STOP, "agent")
    assert (made.volume("data") / "order").read_text().split() == ["restore"] * 2
    made.wait(lambda: made.phase is Phase.RUNNING, HANG_SECONDS, "the pod runs again")


def test_once_the_trainer_is_done_the_sidecar_has_a_grace_period_of_its_own_and_its_code_is_ignored(
    node: Node,
) -> None:
    failing = sidecar("agent", f'trap "sleep 2; exit 3" TERM; echo up; {FOREVER}', lifecycle=pre_stop("true"))
    made = node.run(pod(container("trainer", "sleep 1"), init=[failing], terminationGracePeriodSeconds=LONG_SECONDS))
    assert made.wait_ended(HANG_SECONDS) is Phase.SUCCEEDED
    assert LONG_SECONDS - HANG_SECONDS < made.timeline.seconds_left("agent") <= LONG_SECONDS
    assert made.container("agent").endings[-1].exit_code == 3
    assert made.timeline.at(What.EXITED, "trainer") <= made.timeline.at(What.PRE_STOP, "agent")


def test_a_sidecar_that_dies_while_the_pod_is_ended_is_not_started_again(node: Node) -> None:
    trainer = container("trainer", leaves_after(1.5, waits_for="/data/go"))
    made = started(node, pod(trainer, init=[sidecar("agent", HEARS)], terminationGracePeriodSeconds=LONG_SECONDS))
    made.delete()
    made.out_of_memory("agent")
    made.wait(lambda: bool(made.container("agent").endings), HANG_SECONDS, "the agent's end")
    (made.volume("data") / "go").touch()
    made.wait_ended(HANG_SECONDS)
    assert made.container("agent").start_count == 1
    assert made.container("agent").endings[-1].reason == "OOMKilled"


def test_a_second_deletion_with_less_grace_counts(node: Node) -> None:
    made = started(node, pod(container("trainer", DEAF), terminationGracePeriodSeconds=600), "trainer")
    made.delete()
    made.delete(grace_seconds=2)
    made.wait_ended(HANG_SECONDS)
    assert made.container("trainer").endings[-1].exit_code == 137


def test_when_the_node_is_gone_everything_is_gone_at_once_and_nobody_is_told(node: Node) -> None:
    hooked = sidecar("agent", HEARS, lifecycle=pre_stop("true"))
    made = started(node, pod(container("trainer", HEARS), init=[hooked]))
    node.lose()
    assert made.phase is Phase.UNKNOWN
    assert not made.timeline.all(What.SIGTERM, "trainer")
    assert not made.timeline.all(What.PRE_STOP, "agent")
    assert [made.container(name).endings[-1].exit_code for name in ("trainer", "agent")] == [137, 137]
    assert not made.volume("data").exists()


@pytest.mark.root
def test_process_1_hears_no_signal_that_it_has_no_handler_for(real_node: Node) -> None:
    # Why a container's program must be the trainer itself, and not a shell around it.
    made = started(
        real_node, pod(container("trainer", f"echo up; {FOREVER}"), terminationGracePeriodSeconds=1), "trainer"
    )
    made.delete()
    made.wait_ended(HANG_SECONDS)
    assert made.container("trainer").endings[-1].exit_code == 137


@pytest.mark.root
def test_with_its_first_process_all_of_a_container_ends(real_node: Node) -> None:
    fork = container("trainer", f'(setsid sh -c "{FOREVER}" &) ; echo up; sleep 1')
    other = sidecar("agent", HEARS)
    made = started(real_node, pod(fork, init=[other]), "agent")
    made.wait(lambda: bool(made.container("trainer").endings), HANG_SECONDS, "the trainer's end")
    assert made.wait_ended(HANG_SECONDS) is Phase.SUCCEEDED


def test_a_mapped_container_leaves_no_process_behind_either(short_directory: object, node: Node) -> None:
    forks = f'(setsid sh -c "echo up; {FOREVER}" &) ; while [ ! -e /data/go ]; do sleep 0.05; done'
    made = node.run(pod(container("trainer", forks)))
    made.wait(lambda: "up" in made.log("trainer"), HANG_SECONDS, "it has forked")
    process = made.container("trainer").process
    assert process is not None
    (made.volume("data") / "go").touch()
    made.wait_ended(HANG_SECONDS)
    assert process.members() == []


def test_who_signals_his_own_process_group_reaches_nobody_outside_his_container(node: Node) -> None:
    made = node.run(pod(container("trainer", 'trap "" TERM; kill 0; exit 0'), container("other", "sleep 1; exit 0")))
    assert made.wait_ended(HANG_SECONDS) is Phase.SUCCEEDED
