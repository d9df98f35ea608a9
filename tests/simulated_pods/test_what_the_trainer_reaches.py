"""What a hostile trainer, the agent's own user without capabilities, gets hold of in its pod."""

import pytest
from tests.podsim.namespaces import missing_namespaces
from tests.podsim.timeline import What
from tests.servers.server import SECRET_KEY
from tests.simulated_pods.demo_job import AGENT, START_SECONDS, TRAINER, DemoJob

from mooring_api.names import POD_CREDENTIALS_PATH

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing_namespaces()), reason=missing_namespaces()),
]

# Every process that can be seen: its files, its environment, and what it has open.
SEARCH = f"""
import glob, os, sys
found = []
for process in glob.glob("/proc/[0-9]*"):
    files = [process + "/root{POD_CREDENTIALS_PATH}/*", process + "/fd/*", process + "/environ"]
    for place in (place for pattern in files for place in glob.glob(pattern)):
        try:
            if os.path.isfile(place):
                with open(place, "rb") as file:
                    if sys.argv[1].encode() in file.read(1 << 20):
                        found.append(place)
        except OSError:
            pass
print("found", sorted(found), flush=True)
"""


def test_the_trainer_finds_the_agents_secret_in_no_process(job: DemoJob) -> None:
    demo = job.start(command=("python", "-c", SEARCH, SECRET_KEY))
    demo.pod.wait(lambda: bool(demo.pod.timeline.all(What.EXITED, TRAINER)), START_SECONDS, "the search ends")
    assert "found []" in demo.pod.log(TRAINER)


def test_the_same_search_finds_it_in_the_agents_own_container(job: DemoJob) -> None:
    demo = job.start()
    demo.wait_begun()
    code, output = demo.pod.execute(AGENT, ["python", "-c", SEARCH, SECRET_KEY], START_SECONDS)
    assert code == 0, output
    assert POD_CREDENTIALS_PATH in output
