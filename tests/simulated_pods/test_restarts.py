"""A job is started again under the same name: suspended and resumed, restarted in place, evicted while it restores.

Its launcher gives every start the same labels, so nothing but what is stored tells one start from the next.
"""

from typing import Final

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.podsim.timeline import What
from tests.servers.faults import Fault, Rule
from tests.simulated_pods.demo_job import AGENT, RESTORE, DemoJob, DemoPod

# Restored before the program starts, agreed by a pin; or while it starts, as its client asks.
pytestmark = [
    pytest.mark.parametrize("restore", ["whole", "lazy"]),
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]

# Of a JobSet that Kueue has suspended and resumed: neither uid nor restart count changes.
_LABELS: Final = {
    "jobset.sigs.k8s.io/jobset-uid": "0b2cfb0e-9d4c-4d1f-a2f5-3a2a0f0f6d11",
    "jobset.sigs.k8s.io/restart-attempt": "0",
    "jobset.sigs.k8s.io/replicatedjob-name": "node",
    "jobset.sigs.k8s.io/job-index": "0",
    "batch.kubernetes.io/job-completion-index": "0",
}


def _suspend(demo: DemoPod) -> int:
    """Delete the pod, as suspending does; the step at which it stopped."""
    demo.pod.delete()
    demo.pod.wait_ended(HANG_SECONDS)
    return demo.steps()[-1]


def _downloads(job: DemoJob) -> list[str]:
    """The files of checkpoints that were fetched, the small ones of the commit protocol left out."""
    return [
        request.path
        for request in job.proxy.log
        if request.method == "GET" and "/checkpoint-" in request.path and "/.keepstep/" not in request.path
    ]


def _restart_in_place(demo: DemoPod) -> None:
    """Returns once every container was ended, and the first begins again."""
    before = len(demo.pod.timeline.all(What.STARTED, RESTORE))
    demo.pod.restart_in_place()
    demo.pod.wait(lambda: len(demo.pod.timeline.all(What.STARTED, RESTORE)) > before, HANG_SECONDS, "it restores again")


def _stopped_at(demo: DemoPod, times: int) -> int:
    """The last step that was trained before the trainer began for that time."""
    said = demo.said()
    begins = [position for position, line in enumerate(said) if "begun" in line]
    return [int(line["step"]) for line in said[: begins[times - 1]] if "step" in line][-1]


def test_a_job_that_is_suspended_and_resumed_goes_on_where_it_stopped_each_time(restore: str, job: DemoJob) -> None:
    demo = job.start(labels=_LABELS, restore=restore)
    assert demo.wait_begun() == 0
    for _ in range(3):
        demo.wait_step(max([0, *demo.begun()]) + 2)
        stopped_at = _suspend(demo)
        assert job.stored_steps()[-1] == stopped_at
        demo = job.start(labels=_LABELS, restore=restore)
        assert demo.wait_begun() == stopped_at


@pytest.mark.parametrize("bytes_per_second", [0, 100_000], ids=["the agent leaves in order", "the agent is killed"])
def test_a_pod_that_is_restarted_in_place_trains_on_each_time(
    restore: str, bytes_per_second: int, job: DemoJob
) -> None:
    demo = job.start(labels=_LABELS, restore=restore)
    demo.wait_begun()
    for times in (2, 3):
        durable = demo.save_now()
        job.wait_stored(durable, demo)
        job.proxy.throttle(bytes_per_second)
        job.proxy.log.clear()
        _restart_in_place(demo)
        job.proxy.throttle(0)
        # Saved just in time, if the two seconds were enough for that.
        assert demo.wait_begun(times) in (durable, _stopped_at(demo, times))
        # Where the agent was killed, the trainer may have removed what was committed before.
        assert demo.pod.timeline.all(What.SIGKILL, AGENT) or _downloads(job) == []
        demo.pod.wait(lambda: "step" in demo.said()[-1], HANG_SECONDS, "it trains on")
    assert not any(row["problems"] for row in job.view.verify())


def test_a_pod_that_is_evicted_while_it_restores_is_replaced_by_one_that_does(restore: str, job: DemoJob) -> None:
    demo = job.start(labels=_LABELS, restore=restore)
    demo.wait_begun()
    demo.wait_step(3)
    stopped_at = _suspend(demo)
    job.proxy.add(Rule(name="slow", fault=Fault.BLACKHOLE, method="GET", target="/checkpoint-", times=-1))
    evicted = job.start(labels=_LABELS, restore=restore)
    evicted.pod.wait(lambda: job.proxy.hits("slow") > 0, HANG_SECONDS, "it restores")
    evicted.pod.evict()
    evicted.pod.wait_ended(HANG_SECONDS)
    assert evicted.pod.container(RESTORE).start_count == 1
    job.proxy.clear()
    assert job.start(labels=_LABELS, restore=restore).wait_begun() == stopped_at
