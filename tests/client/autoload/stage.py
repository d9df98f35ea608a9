"""Real interpreters with Keepstep as an injection brings it.

Frameworks and integrations are stand-ins of a few lines here; tests/trainers runs the real ones.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness.bounds import HANG_SECONDS

HOOKS = (
    *(f"integrations/{name}.py" for name in ("hugging_face", "lightning", "accelerate", "deepspeed", "dcp")),
    "integrations/process_group.py",
    "workers/worker_processes.py",
    "ranks/spawned.py",
)
HOOKED = (
    "transformers.trainer",
    "lightning.pytorch.trainer.trainer",
    "pytorch_lightning.trainer.trainer",
    "accelerate.accelerator",
    "deepspeed.runtime.engine",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.utils.data._utils.worker",
    "torch.distributed.checkpoint._async_process_executor",
    "torchdata.stateful_dataloader.stateful_dataloader",
    "torch.multiprocessing.spawn",
)


def run(
    *arguments: str, path: tuple[Path, ...] = (), environment: Mapping[str, str] | None = None, python: str = ""
) -> "subprocess.CompletedProcess[str]":
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KEEPSTEP_"))}
    variables |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [python or sys.executable, *arguments],
        env=variables | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Folders for PYTHONPATH: Keepstep as an injection brings it, and the program's frameworks."""

    injected: Path
    frameworks: Path
    more: tuple[Path, ...] = field(default=())

    def run(self, code: str, *flags: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        path = (self.injected, *self.more, self.frameworks)
        return run(*flags, "-c", code, path=path, environment=environment)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
