"""Parts of the pod, or all of it, are gone without a word: the agent, the node, and pods that overlap."""

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.podsim.phase import Phase
from tests.servers.faults import Fault, Rule
from tests.simulated_pods.demo_job import AGENT, RESTORE, TRAINER, DemoJob, DemoPod

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1800)]

MIB = 2**20


def begin_upload(job: DemoJob, demo: DemoPod) -> int:
    """Have a save on its way, one part of which is stored and the last of which never will be; its step."""
    job.proxy.add(Rule(name="hold", fault=Fault.BLACKHOLE, method="PUT", target="partNumber=2", times=-1))
    step = demo.save_now()

    def one_part_is_stored() -> bool:
        rows = [row for row in demo.agent_status()["checkpoints"] if row["step"] == step]
        return bool(rows) and rows[0]["durable_bytes"] > 0

    demo.pod.wait(one_part_is_stored, HANG_SECONDS, f"a part of step {step} is stored")
    assert step not in job.stored_steps()
    return step


def first_parts_stored(job: DemoJob) -> int:
    return sum(
        request.method == "PUT" and "partNumber=1&" in f"{request.query}&" and request.status == 200
        for request in job.proxy.log
    )


def test_an_agent_that_runs_out_of_memory_goes_on_where_it_was_and_training_never_notices(job: DemoJob) -> None:
    # A sidecar is started again whatever the pod's policy.
    demo = job.start(restart_policy="Never")
    demo.wait_begun()
    step = begin_upload(job, demo)
    stored = first_parts_stored(job)
    demo.pod.out_of_memory(AGENT)
    assert demo.pod.phase is Phase.RUNNING
    demo.pod.wait(lambda: demo.pod.container(AGENT).start_count == 2, HANG_SECONDS, "the agent is back")
    job.proxy.clear()
    job.wait_stored(step, demo)
    assert first_parts_stored(job) == stored
    assert demo.pod.container(AGENT).endings[0].reason == "OOMKilled"
    # And it does what it is there for.
    demo.wait_step(step + 2)
    assert demo.pod.container(TRAINER).start_count == 1
    demo.pod.delete()
    demo.pod.wait_ended(HANG_SECONDS)
    assert job.stored_steps()[-1] == demo.steps()[-1]
    assert demo.begun() == [0]


def test_when_the_node_is_gone_the_next_pod_begins_at_the_newest_durable_step_and_sees_nothing_partial(
    job: DemoJob,
) -> None:
    first = job.start()
    first.wait_begun()
    durable = first.save_now()
    job.wait_stored(durable, first)
    begin_upload(job, first)
    job.node.lose()
    assert first.pod.phase is Phase.UNKNOWN
    job.proxy.clear()
    second = job.start()
    assert second.wait_begun() == durable
    later = second.save_now()
    job.wait_stored(later, second)
    assert job.stored_steps() == [durable, later]
    assert not any(row["problems"] for row in job.view.verify())


def begun_and_held(job: DemoJob) -> tuple[DemoPod, int]:
    """A pod that has stored a step and trained on, and whose further commits the store refuses; and that step."""
    old = job.start()
    old.wait_begun()
    durable = old.save_now()
    job.wait_stored(durable, old)
    old.wait_step(durable + 2)
    job.proxy.add(Rule(name="hold", fault=Fault.STATUS, method="PUT", target="/.keepstep/commits/", times=-1))
    return old, durable


@pytest.mark.parametrize("restore", ["whole", "lazy"])
def test_a_replacement_that_starts_while_the_old_pod_drains_waits_for_what_that_one_commits(
    restore: str, job: DemoJob
) -> None:
    # The Job's default, podReplacementPolicy TerminatingOrFailed: two pods at one prefix.
    old, durable = begun_and_held(job)
    old.pod.delete()
    replacement = job.start(restore=restore)
    said = lambda: "restore.waits_for_predecessor" in replacement.pod.log(RESTORE)  # noqa: E731
    replacement.pod.wait(said, HANG_SECONDS, "the replacement waits")
    assert not old.pod.ended
    job.proxy.clear()
    assert old.pod.wait_ended(HANG_SECONDS) is Phase.FAILED
    stopped_at = old.steps()[-1]
    assert replacement.wait_begun() == stopped_at
    assert job.stored_steps() == [durable, stopped_at]
    assert not any(row["problems"] for row in job.view.verify())


def test_a_pod_that_nobody_waited_for_spoils_nothing_and_the_newest_wins(job: DemoJob) -> None:
    old, durable = begun_and_held(job)
    job.proxy.add(Rule(name="no notice", fault=Fault.STATUS, method="PUT", target="/.keepstep/draining/", times=-1))
    old.pod.delete()
    replacement = job.start()
    assert replacement.wait_begun() == durable
    assert not old.pod.ended
    job.proxy.clear()
    assert old.pod.wait_ended(HANG_SECONDS) is Phase.FAILED
    stopped_at = old.steps()[-1]
    assert job.stored_steps() == [durable, stopped_at]
    # Its own goes where nothing of the old one lies, though it may be of the same step.
    own = replacement.save_now()
    replacement.pod.wait(lambda: len(job.stored_steps()) == 3, HANG_SECONDS, "the replacement's save is durable")
    assert sorted(job.stored_steps()) == sorted([durable, stopped_at, own])
    assert not any(row["problems"] for row in job.view.verify())
    job.node.lose()
    assert job.start().wait_begun() == max(stopped_at, own)
