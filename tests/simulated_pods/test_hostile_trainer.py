"""A pod whose trainer is hostile: of the agent's user, without capabilities, in mounts of its own, as on a node."""

from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.servers.server import SECRET_KEY
from tests.simulated_pods.demo_job import AGENT, DemoJob

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(1800)]

_PROGRAM = Path(__file__).with_name("hostile_trainer.py")
_REFUSED = "staging.descriptor_unreadable"


def test_a_hostile_trainer_gets_nothing_that_only_the_agent_can_read(job: DemoJob) -> None:
    demo = job.start(command=["python", str(_PROGRAM), str(len(SECRET_KEY))])
    demo.pod.wait(lambda: any("attacked" in line for line in demo.said()), HANG_SECONDS, "the attack is over")
    assert [line["sees"] for line in demo.said() if "sees" in line] == [[]]
    assert next(line["attacked"] for line in demo.said() if "attacked" in line)["taken"]
    demo.pod.out_of_memory(AGENT)
    demo.pod.wait(lambda: demo.pod.container(AGENT).start_count == 2, HANG_SECONDS, "the agent is back")
    demo.pod.wait(lambda: bool(job.stored_steps()), HANG_SECONDS, "an honest folder is stored")
    demo.pod.wait(lambda: bool(demo.agent_log(_REFUSED)), HANG_SECONDS, "the forged save is refused")
    assert [line["reason"] for line in demo.agent_log(_REFUSED)] == ["[Errno 20] Not a directory: 'rank-00000'"]
    demo.pod.delete()
    demo.pod.wait_ended(HANG_SECONDS)
    stored = job.view.keys()
    assert stored
    assert not [key for key in stored if SECRET_KEY.encode() in job.view.read(key)]
