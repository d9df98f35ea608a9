"""The names by which autoload and `keepstep.protect` know the real frameworks, as they are installed here."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from tests.harness.bounds import HANG_SECONDS

from keepstep import autoload

CLASSES = {
    "transformers.trainer": ("Trainer", "hugging_face"),
    "lightning.pytorch.trainer.trainer": ("Trainer", "lightning"),
    "pytorch_lightning.trainer.trainer": ("Trainer", "lightning"),
    "accelerate.accelerator": ("Accelerator", "accelerate"),
    "deepspeed.runtime.engine": ("DeepSpeedEngine", "deepspeed"),
}


def imported(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(autoload.path())},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


@pytest.fixture(scope="module")
def hooked() -> "subprocess.CompletedProcess[str]":
    """A program that imports all of them. A line for each: its module, whose its `__init__` is, as what it is known."""
    installed = {module: names for module, names in CLASSES.items() if find_spec(module.partition(".")[0])}
    code = f"""if True:
        import importlib
        from keepstep.autoload.zero_code import TRAINERS
        for module, (name, _) in {installed}.items():
            one = getattr(importlib.import_module(module), name)
            hook = one.__init__.__globals__["__name__"]
            print("framework", module, hook, TRAINERS.get((one.__module__, one.__qualname__)))
    """
    return imported(code)


@pytest.mark.parametrize("module", CLASSES)
def test_a_real_framework_is_hooked_and_its_trainer_known_without_a_warning(
    module: str, hooked: "subprocess.CompletedProcess[str]"
) -> None:
    if find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module.partition('.')[0]} is not installed")
    _, integration = CLASSES[module]
    expected = f"framework {module} keepstep.integrations.ownership {integration}"
    assert expected in hooked.stdout.splitlines(), hooked.stdout + hooked.stderr
    assert "keepstep:" not in hooked.stderr


def test_the_real_torch_is_hooked_without_a_warning() -> None:
    pytest.importorskip("torch")
    code = """if True:
        import sys, torch.utils.data, torch.distributed.checkpoint as dcp
        print(torch.utils.data._utils.worker._worker_loop.__module__)
        writer = sys.modules["torch.distributed.checkpoint._async_process_executor"]._AsyncCheckpointProcess
        print(writer._checkpointing_subprocess.__module__)
        print("keepstep.integrations.dcp" in sys.modules)
    """
    got = imported(code)
    assert got.stdout.split() == ["keepstep.workers.worker_processes"] * 2 + ["True"], got.stderr
    assert "keepstep:" not in got.stderr
