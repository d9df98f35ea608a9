"""What there is for a hostile trainer, the agent's own user without capabilities, to get hold of in its pod."""

from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.podsim.images import keepstep_image, python_image
from tests.podsim.namespaces import missing_namespaces
from tests.podsim.node import Node
from tests.podsim.timeline import What
from tests.servers.server import SECRET_KEY
from tests.simulated_pods.demo_job import AGENT, TRAINER, DemoJob, injected

from keepstep_api.names import POD_CREDENTIALS_PATH, POD_DESTINATION_PATH

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
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
    demo.pod.wait(lambda: bool(demo.pod.timeline.all(What.EXITED, TRAINER)), HANG_SECONDS, "the search ends")
    assert "found []" in demo.pod.log(TRAINER)


def test_the_same_search_finds_it_in_the_agents_own_container(job: DemoJob) -> None:
    demo = job.start()
    demo.wait_begun()
    code, output = demo.pod.execute(AGENT, ["python", "-c", SEARCH, SECRET_KEY], HANG_SECONDS)
    assert code == 0, output
    assert POD_CREDENTIALS_PATH in output


SAVE_AND_STAY = """
import keepstep, time
with keepstep.Checkpointer().save(1) as directory:
    (directory / "model.bin").write_bytes(b"mine")
time.sleep(600)
"""


def test_of_a_claim_restore_and_agent_have_their_own_path_and_no_other_runs(short_directory: Path) -> None:
    claim = short_directory / "claim"
    others = claim / "runs" / "other"
    others.mkdir(parents=True)
    said = {
        "keepstep.dev/inject": "true",
        "keepstep.dev/destination": "pvc://checkpoints/runs/mine",
        "keepstep.dev/run-as-user": "0",
    }
    trainer = {"name": TRAINER, "image": "trainer", "command": ["python", "-c", SAVE_AND_STAY]}
    pod = {
        "metadata": {"generateName": "claim-", "annotations": said},
        "spec": {"restartPolicy": "Never", "hostNetwork": True, "containers": [trainer]},
    }
    images = {"keepstep": keepstep_image(), "trainer": python_image()}
    with Node(short_directory / "n", images=images, claims={"checkpoints": claim}) as node:
        made = node.run(injected(pod))
        committed = claim / "runs/mine/.keepstep/commits"
        made.wait(lambda: committed.is_dir() and any(committed.iterdir()), HANG_SECONDS, "the save is committed")
        code, seen = made.execute(AGENT, ["sh", "-c", f"find {POD_DESTINATION_PATH} -maxdepth 3"], HANG_SECONDS)
    assert code == 0, seen
    assert f"{POD_DESTINATION_PATH}/checkpoints/runs/mine" in seen
    assert "other" not in seen
    assert not list(others.iterdir())
