"""Who keeps the checkpoints in `benchmarks.beside_sdk`: `keepstep run`, and the OpenShift AI SDK."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from tests.harness.run_process import RunProcess
from tests.servers.server import ENVIRONMENT, Bucket

from keepstep_agent.core.stored.object_layout import step_prefix
from keepstep_api.names import JUST_IN_TIME_EXIT_CODE

SAVE_EVERY: Final = 20
"""Steps."""
_ENVIRONMENT: Final = {**ENVIRONMENT, "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1"}
_FILES: Final = frozenset(
    {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin"}
)
"""That the Trainer writes for one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One training on an empty disk."""

    folder: Path
    bucket: Bucket

    @property
    def volume(self) -> Path:
        return self.folder / "volume"

    @property
    def output(self) -> Path:
        return self.volume / "checkpoints"

    @property
    def notes(self) -> Path:
        return self.folder / "notes"

    @property
    def program(self) -> tuple[str, ...]:
        """The module that trains, and its arguments."""
        return "benchmarks.beside_sdk.program", str(self.output), str(self.notes), str(SAVE_EVERY)

    def logs(self) -> str:
        """Return what the program and all beside it said."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))


class Keepstep:
    """`keepstep run` with its defaults."""

    name: Final = "Keepstep"
    exit_code: Final = JUST_IN_TIME_EXIT_CODE
    """Of a training that has saved just in time."""

    @contextmanager
    def started(self, life: Life) -> Iterator["subprocess.Popen[bytes]"]:
        """Start a training; at the end what still runs of it is killed."""
        run = RunProcess(
            life.volume,
            life.bucket.destination,
            environment=_ENVIRONMENT,
            command=(sys.executable, "-m", *life.program),
            autoload=True,
            endpoint_url=life.bucket.endpoint_url,
        )
        with run:
            yield run.process

    def is_stored(self, bucket: Bucket, step: int) -> bool:
        """Whether the store has the whole checkpoint of that step."""
        return bool(_keys(bucket, step_prefix(step)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sdk:
    """The SDK's code around the program, with the defaults of its `TransformersTrainer`."""

    checkout: Path
    name: str = "SDK"
    exit_code: int = 0

    @contextmanager
    def started(self, life: Life) -> Iterator["subprocess.Popen[bytes]"]:
        configuration = {
            "enable_jit": True,
            "output_dir": str(life.output),
            "cloud_remote_storage_uri": life.bucket.destination,
            "save_strategy": "steps",
            "save_steps": SAVE_EVERY,
            "save_total_limit": 3,
        }
        # rclone answers a range with the checksum of the whole object, which botocore would find wrong.
        store = {"AWS_S3_ENDPOINT": life.bucket.endpoint_url, "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required"}
        launcher = ["benchmarks.beside_sdk.with_sdk", str(self.checkout), json.dumps(configuration)]
        with (life.folder / "sdk.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *launcher, *life.program],
                env={**os.environ, **_ENVIRONMENT, **store},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def is_stored(self, bucket: Bucket, step: int) -> bool:
        # Until it is whole, a marker lies among the files.
        return _keys(bucket, f"checkpoint-{step}/") == _FILES


Contestant: TypeAlias = Keepstep | Sdk


def _keys(bucket: Bucket, prefix: str) -> set[str]:
    """Return what follows that prefix, itself below the destination, in the keys of all objects."""
    whole = f"{bucket.prefix}/{prefix}"
    client = bucket.client()
    try:
        listed = client.list_objects_v2(Bucket=bucket.name, Prefix=whole).get("Contents", [])
    finally:
        client.close()
    return {entry["Key"].removeprefix(whole) for entry in listed}
