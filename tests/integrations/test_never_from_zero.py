"""However a program starts, it never begins at step 0 because its checkpoints cannot be had."""

import sys
from pathlib import Path

import pytest
from tests.integrations.lives import Lives, learned
from tests.lanes import nightly

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node=1"
LOOPS = {
    "dcp": f"{TORCHRUN} {EXAMPLES / 'dcp_loop.py'} --steps 40 --save-every 20",
    "torch_loop": f"{TORCHRUN} {EXAMPLES / 'ddp.py'} --steps 40 --save-every 20 --workers 0",
}


def spoil(store: Path) -> None:
    """Cut off every file of every checkpoint that is stored: all are committed, and none can be restored."""
    files = [path for path in store.glob("[!.]*/**/*") if path.is_file()]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    "framework",
    ["hugging_face", "lightning", "accelerate", "checkpointer", "torch_loop", "dcp", *nightly("deepspeed")],
)
@pytest.mark.parametrize("restore", ["lazy", *nightly("whole")])
def test_what_cannot_be_restored_is_an_error_and_no_step_is_trained(
    framework: str, restore: str, tmp_path: Path
) -> None:
    lives = Lives(tmp_path, framework, "inside")
    command = LOOPS.get(framework) or lives.command("one")
    first = lives.start(command)
    assert first.returncode == 0, first.stderr
    lives.lose_the_disk()
    spoil(lives.store)
    second = lives.start(command, restore=restore)
    assert second.returncode not in (0, 143), second.stderr
    assert not learned(second.stdout)
    assert "step=" not in second.stdout
    assert "can be restored" in second.stderr, second.stderr
