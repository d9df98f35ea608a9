"""The pod is told to end: with time enough, with too little, and with hardly any."""

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.podsim.phase import Phase
from tests.simulated_pods.demo_job import AGENT, TRAINER, DemoJob

from keepstep_api.names import JUST_IN_TIME_EXIT_CODE, NOT_DURABLE_EXIT_CODE

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1800)]

KILLED = 137
# So slow that 10 MB do not fit into any of the short times below, nor into three times as much.
A_TRICKLE = 100_000


def test_with_time_enough_the_step_at_which_it_stopped_is_durable_and_the_next_pod_begins_there(job: DemoJob) -> None:
    first = job.start()
    first.wait_begun()
    first.wait_step(3)
    first.pod.delete()
    # Nobody waits for the end of the grace period. With 0 a Job would count it as done.
    assert first.pod.wait_ended(HANG_SECONDS) is Phase.FAILED
    assert first.pod.container(TRAINER).endings[-1].exit_code == JUST_IN_TIME_EXIT_CODE
    assert first.pod.container(AGENT).endings[-1].exit_code == 0
    stopped_at = first.steps()[-1]
    assert job.stored_kinds() == {stopped_at: "just-in-time"}
    assert job.start().wait_begun() == stopped_at


def test_with_too_little_time_the_older_step_stays_what_is_resumed_and_what_is_lost_is_named(job: DemoJob) -> None:
    # The trainer's own save does fit, on a busy machine too.
    first = job.start(grace_seconds=30)
    first.wait_begun()
    durable = first.save_now()
    job.wait_stored(durable, first)
    job.proxy.throttle(A_TRICKLE)
    first.pod.delete()
    assert first.pod.wait_ended(HANG_SECONDS) is Phase.FAILED
    assert job.stored_steps() == [durable]
    code = first.pod.container(AGENT).endings[-1].exit_code
    assert code in (NOT_DURABLE_EXIT_CODE, KILLED)
    if code == NOT_DURABLE_EXIT_CODE:
        assert f"(step {first.steps()[-1]}, just-in-time)" in first.not_durable()[0]
    job.proxy.throttle(0)
    assert job.start().wait_begun() == durable


def test_from_an_eviction_nothing_is_lost_but_what_was_never_durable(job: DemoJob) -> None:
    # The pod's own grace period is what the agent believes in; kubelet gives it a thousandth of that.
    first = job.start()
    first.wait_begun()
    durable = first.save_now()
    job.wait_stored(durable, first)
    job.proxy.throttle(A_TRICKLE)
    first.pod.evict()
    assert first.pod.wait_ended(HANG_SECONDS) is Phase.FAILED
    assert first.pod.reason == "Evicted"
    assert job.stored_steps() == [durable]
    job.proxy.throttle(0)
    assert job.start().wait_begun() == durable


def test_an_eviction_that_leaves_just_enough_time_costs_no_step_or_those_since_the_last_save(job: DemoJob) -> None:
    first = job.start(grace_seconds=30)
    first.wait_begun()
    durable = first.save_now()
    job.wait_stored(durable, first)
    first.pod.evict()
    assert first.pod.wait_ended(HANG_SECONDS) is Phase.FAILED
    newest = job.stored_steps()[-1]
    assert newest in (durable, first.steps()[-1])
    assert not any(row["problems"] for row in job.view.verify())
    assert job.start().wait_begun() == newest
