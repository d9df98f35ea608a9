"""A pod whose trainer is hostile: of the agent's user, without capabilities, in mounts of its own, as on a node."""

from pathlib import Path

import pytest
from tests.servers.server import SECRET_KEY
from tests.simulated_pods.demo_job import AGENT, END_SECONDS, START_SECONDS, DemoJob

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(900)]

_PROGRAM = Path(__file__).with_name("hostile_trainer.py")
_REFUSED = "staging.descriptor_unreadable"


def test_a_hostile_trainer_gets_nothing_that_only_the_agent_can_read(job: DemoJob) -> None:
    demo = job.start(command=["python", str(_PROGRAM), str(len(SECRET_KEY))])
    demo.pod.wait(lambda: any("attacked" in line for line in demo.said()), START_SECONDS, "the attack is over")
    assert [line["sees"] for line in demo.said() if "sees" in line] == [[]]
    assert next(line["attacked"] for line in demo.said() if "attacked" in line)["taken"]
    demo.pod.out_of_memory(AGENT)
    demo.pod.wait(lambda: demo.pod.container(AGENT).start_count == 2, START_SECONDS, "the agent is back")
    demo.pod.wait(lambda: bool(job.stored_steps()), START_SECONDS, "an honest folder is stored")
    demo.pod.wait(lambda: bool(demo.agent_log(_REFUSED)), START_SECONDS, "the forged save is refused")
    assert [line["reason"] for line in demo.agent_log(_REFUSED)] == ["[Errno 20] Not a directory: 'rank-00000'"]
    demo.pod.delete()
    demo.pod.wait_ended(END_SECONDS)
    stored = job.view.keys()
    assert stored
    assert not [key for key in stored if SECRET_KEY.encode() in job.view.read(key)]
