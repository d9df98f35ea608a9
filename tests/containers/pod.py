"""A pod by hand: restore, agent and trainer, containers that share a volume and a socket as the injection makes them.

The trainer is `tests/integration/trainer.py`: the real client, without torch, in the same image.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.containers.container import Container
from tests.containers.engine import Engine
from tests.containers.image import ROOT
from tests.servers.server import ENVIRONMENT, Bucket

GRACE_SECONDS: Final = 600
_TRAINER: Final = ROOT / "tests" / "integration" / "trainer.py"
_PATHS: Final = {
    "KEEPSTEP_VOLUME": "/keepstep",
    "KEEPSTEP_CHECKPOINT_DIRECTORY": "/keepstep/checkpoints",
    "KEEPSTEP_SOCKET": "/run/keepstep/agent.sock",
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}


class Pod:
    """Its volumes are as kubelet makes an emptyDir: for everybody to write."""

    def __init__(self, engine: Engine, directory: Path, bucket: Bucket, *, endpoint_url: str = "") -> None:
        self._engine = engine
        self.volume = directory / "volume"
        self._mounts = {self.volume: "/keepstep", directory / "socket": "/run/keepstep"}
        for folder in self._mounts:
            folder.mkdir(parents=True)
            folder.chmod(0o777)
        self._agent = {
            **ENVIRONMENT,
            **_PATHS,
            "KEEPSTEP_DESTINATION": bucket.destination,
            "KEEPSTEP_S3_ENDPOINT_URL": endpoint_url or bucket.endpoint_url,
            "KEEPSTEP_EVICTION_THRESHOLD_PERCENT": "0",
            "KEEPSTEP_PART_SIZE_BYTES": "5MiB",
            "KEEPSTEP_GRACE_SECONDS": str(GRACE_SECONDS),
        }

    def restore(self, user: str) -> Container:
        return Container(self._engine, "restore", user=user, environment=self._agent, mounts=self._mounts)

    def agent(self, user: str, *options: str) -> Container:
        return Container(
            self._engine, "agent", user=user, environment=self._agent, mounts=self._mounts, options=options
        )

    def trainer(self, user: str, *, steps: int, every: int, save_bytes: int, step_seconds: float = 0.0) -> Container:
        environment: Mapping[str, str] = {
            **_PATHS,
            "STEPS": str(steps),
            "EVERY": str(every),
            "SAVE_BYTES": str(save_bytes),
            "STEP_SECONDS": str(step_seconds),
            "STEP_LOG": "/dev/null",
        }
        mounts = {**self._mounts, _TRAINER: "/trainer.py"}
        return Container(
            self._engine,
            "/trainer.py",
            user=user,
            entrypoint=["python"],
            environment=environment,
            mounts=mounts,
            # It may write where it wants to, as most do; only its root is the image's.
            options=["--tmpfs=/tmp"],
        )
