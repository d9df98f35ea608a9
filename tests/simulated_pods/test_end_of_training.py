"""A training that ends by itself, well or badly: the pod's phase, what is durable, and where the next one begins."""

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.podsim.phase import Phase
from tests.simulated_pods.demo_job import AGENT, TRAINER, DemoJob

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_when_training_is_done_the_pod_completes_and_the_last_step_is_durable(job: DemoJob) -> None:
    first = job.start(steps=12, save_every=5, restart_policy="OnFailure")
    # The agent leaves with the trainer, and waits for nothing.
    assert first.pod.wait_ended(HANG_SECONDS) is Phase.SUCCEEDED
    assert job.stored_kinds() == {5: "periodic", 10: "periodic", 12: "final"}
    # Whoever starts it again finds nothing left to do.
    second = job.start(steps=12)
    assert second.pod.wait_ended(HANG_SECONDS) is Phase.SUCCEEDED
    assert second.begun() == [12]
    assert second.steps() == []


def test_a_trainer_that_crashes_is_started_again_in_its_pod_and_goes_on_from_what_is_not_even_durable(
    job: DemoJob,
) -> None:
    demo = job.start(restart_policy="OnFailure")
    assert demo.wait_begun() == 0
    durable = demo.save_now()
    job.wait_stored(durable, demo)
    job.proxy.outage(True)
    local = demo.save_now()
    demo.pod.crash(TRAINER)
    assert demo.wait_begun(times=2) == local
    assert demo.pod.container(AGENT).start_count == 1
    assert job.stored_steps() == [durable]
    job.proxy.outage(False)
    job.wait_stored(local, demo)


def test_after_a_crash_that_ends_the_pod_what_was_saved_still_gets_out_and_the_next_pod_begins_there(
    job: DemoJob,
) -> None:
    first = job.start(restart_policy="Never")
    assert first.wait_begun() == 0
    job.wait_stored(first.save_now(), first)
    job.proxy.throttle(2 * 2**20)
    last = first.save_now()
    first.pod.crash(TRAINER)
    assert first.pod.wait_ended(HANG_SECONDS) is Phase.FAILED
    assert first.pod.container(AGENT).endings[-1].exit_code == 0
    assert job.stored_steps()[-1] == last
    job.proxy.throttle(0)
    assert job.start().wait_begun() == last
