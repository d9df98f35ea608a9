"""A program that saves without ever calling fsync, and announces over gRPC with save ids of its own.

`trainer.py <volume> <run> <attempt>`: one checkpoint after the other until it is killed or the agent does not answer.
Its own copy it deletes as soon as the announcement is answered, as the API allows. Prints what it begins and what was
acknowledged.
"""

import itertools
import shutil
import sys
from pathlib import Path

import grpc
from tests.chaos.content import rank_files
from tests.harness.bounds import HANG_SECONDS

from keepstep_api.names import CHECKPOINT_DIRECTORY, SOCKET, STATE_DIRECTORY, socket_address
from keepstep_api.v1 import agent_pb2, agent_pb2_grpc

STEPS_PER_LIFE = 1000


def main() -> None:
    volume, run, attempt = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    with grpc.insecure_channel(socket_address(volume / STATE_DIRECTORY / SOCKET)) as channel:
        stub = agent_pb2_grpc.AgentStub(channel)
        for step in itertools.count(int(attempt) * STEPS_PER_LIFE + 1):
            save = f"{attempt}-c{step:06d}"
            print(f"begun {step} {save}", flush=True)
            path = volume / CHECKPOINT_DIRECTORY / f"checkpoint-{step}"
            for name, body in rank_files(run, attempt, step, 0).items():
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                (path / name).write_bytes(body)
            request = agent_pb2.AnnounceCheckpointRequest(path=str(path), step=step, save=save)
            stub.AnnounceCheckpoint(request, timeout=HANG_SECONDS)
            print(f"acknowledged {step} {save}", flush=True)
            shutil.rmtree(path)


if __name__ == "__main__":
    main()
