"""How an agent that is a regular container comes to its end: by what it sees of the other containers' processes."""

import pytest
from tests.podsim.phase import Phase
from tests.podsim.timeline import What
from tests.simulated_pods.demo_job import AGENT, END_SECONDS, RESTORE, START_SECONDS, TRAINER, DemoJob

from mooring_agent.core.injection.spec import Sidecar

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.parametrize("job", [Sidecar.REGULAR], indirect=True, ids=str),
]

ROOT: dict[str, object] = {}
"""What a program has that says nothing: user 0 with a runtime's usual capabilities."""
KNOWS_NOTHING = ("python", "-c", "import time; print('up', flush=True); time.sleep(8)")
"""A program that takes no lock and calls nobody."""
# Far less than the 660 s that it would wait for a trainer it never saw.
SOON_SECONDS = 90.0


@pytest.mark.parametrize("user", ["0", "1234"])
def test_it_leaves_after_a_trainer_that_it_knows_by_its_mounts_alone_whoever_either_runs_as(
    job: DemoJob, user: str
) -> None:
    demo = job.start(command=KNOWS_NOTHING, security_context=ROOT, annotations={"mooring.dev/run-as-user": user})
    assert demo.pod.wait_ended(END_SECONDS) is Phase.SUCCEEDED
    assert [line["seen"] for line in demo.agent_log("trainer.gone")] == [True]
    assert 3 <= demo.pod.timeline.seconds_between((What.EXITED, TRAINER), (What.EXITED, AGENT)) < SOON_SECONDS


def test_where_it_cannot_see_the_trainer_it_says_so_and_stays(job: DemoJob) -> None:
    demo = job.start(command=("true",), shares_processes=False)
    demo.pod.wait(lambda: bool(demo.agent_log("trainer.invisible")), START_SECONDS, "the agent says so")
    demo.pod.wait(lambda: bool(demo.pod.container(TRAINER).endings), START_SECONDS, "the trainer has ended")
    assert "shareProcessNamespace" in demo.agent_log("trainer.invisible")[0]["hint"]
    assert demo.pod.container(AGENT).running
    demo.pod.delete()
    assert demo.pod.wait_ended(END_SECONDS) is Phase.SUCCEEDED
    assert demo.pod.container(RESTORE).start_count == 1
