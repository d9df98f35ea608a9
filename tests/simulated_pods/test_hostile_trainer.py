"""A pod whose trainer is hostile: of the agent's user, without capabilities, in mounts of its own, as on a node."""

import pytest
from tests.servers.server import SECRET_KEY
from tests.simulated_pods.demo_job import AGENT, END_SECONDS, START_SECONDS, DemoJob

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(900)]

# The agent has its Secret at a place that everybody knows. The trainer writes the descriptor of a save that never was,
# whose pin is a link to it, and has the agent start anew; it keeps swapping a folder for such a link besides.
_ATTACK = """
import json, os, pathlib, sys, threading, time
from mooring_api import names

size = int(sys.argv[1])
secret = pathlib.Path(names.POD_CREDENTIALS_PATH)
volume = pathlib.Path(os.environ[names.ENV_VOLUME])
print(json.dumps({"sees": [str(path) for path in (secret, pathlib.Path(names.POD_STATE_DIRECTORY)) if path.exists()]}))

forged = volume / ".mooring" / "staged" / "forged-1"
forged.mkdir(parents=True)
(forged / "rank-00000").symlink_to(secret)
from mooring_agent.core.agent.event_codec import encode_event
from mooring_agent.core.agent.events import Announced
from mooring_agent.core.model import Kind, SaveInfo
info = SaveInfo(save="forged-1", name="checkpoint-1", step=1, kind=Kind.PERIODIC, world_size=1)
announced = encode_event(Announced(at=time.time(), info=info, rank=0,
    source=str(volume / "checkpoints" / "checkpoint-1"), files=(), local_world_size=1)).decode()
file = {"path": "AWS_SECRET_ACCESS_KEY", "size": size, "mtime_ns": 0, "inode": 0, "private": True, "announced": False,
    "changed_ns": 0}
descriptor = {"announcements": [announced], "part_size_bytes": 5242880, "pack_size_bytes": 0}
(forged / "rank-00000.json").write_text(json.dumps({"format": 1, "descriptor": descriptor, "files": [file]}))

shown, real, aside = volume / "checkpoints" / "checkpoint-2", volume / "real", volume / "aside"
real.mkdir()
(real / "AWS_SECRET_ACCESS_KEY").write_bytes(b"x" * size)
shown.parent.mkdir(exist_ok=True)
shown.symlink_to(real)
def swap():
    while True:
        for target in (secret, real):
            aside.unlink(missing_ok=True)
            aside.symlink_to(target)
            aside.rename(shown)
threading.Thread(target=swap, daemon=True).start()

import grpc
from mooring_api.names import socket_address
from mooring_api.v1 import agent_pb2, agent_pb2_grpc
answers = {"taken": 0, "refused": 0}
with grpc.insecure_channel(socket_address(pathlib.Path(os.environ[names.ENV_SOCKET]))) as channel:
    stub = agent_pb2_grpc.AgentStub(channel)
    for number in range(100):
        request = agent_pb2.AnnounceCheckpointRequest(path=str(shown), step=number, save=f"try-{number}")
        try:
            stub.AnnounceCheckpoint(request, timeout=60)
            answers["taken"] += 1
        except grpc.RpcError:
            answers["refused"] += 1
print(json.dumps({"attacked": answers}), flush=True)
time.sleep(3600)
"""


def test_a_hostile_trainer_gets_nothing_that_only_the_agent_can_read(job: DemoJob) -> None:
    demo = job.start(command=["python", "-c", _ATTACK, str(len(SECRET_KEY))])
    demo.pod.wait(lambda: any("attacked" in line for line in demo.said()), START_SECONDS, "the attack is over")
    assert [line["sees"] for line in demo.said() if "sees" in line] == [[]]
    assert next(line["attacked"] for line in demo.said() if "attacked" in line)["taken"]
    demo.pod.out_of_memory(AGENT)
    demo.pod.wait(lambda: demo.pod.container(AGENT).start_count == 2, START_SECONDS, "the agent is back")
    demo.pod.wait(lambda: bool(job.stored_steps()), START_SECONDS, "an honest folder is stored")
    demo.pod.delete()
    demo.pod.wait_ended(END_SECONDS)
    stored = job.view.keys()
    assert stored
    assert not [key for key in stored if SECRET_KEY.encode() in job.view.read(key)]
