"""A framework's program that is told to end leaves with 143 only where its step is stored, and with 75 where it is not.

Each is told in a step that ends with a save of its own, wherever that lies. Under `keepstep run --autoload`.
"""

import signal
import sys
from pathlib import Path

import pytest
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.run_process import RunProcess
from tests.integrations.lives import Lives, resumed
from tests.lanes import nightly

FRAMEWORKS = ["hugging_face", "lightning", "accelerate", "checkpointer", *nightly("deepspeed")]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("place", ["outside", *nightly("inside", "unlinkable")])
@pytest.mark.parametrize("ranks", [1, *nightly(2)])
def test_143_means_that_the_step_is_stored(
    framework: str, place: str, ranks: int, other_filesystem: Path, tmp_path: Path
) -> None:
    if ranks > 1 and framework == "checkpointer":
        pytest.skip("its ranks save one file each, in the program of another test")
    lives = Lives(tmp_path, framework, str(other_filesystem) if place == "unlinkable" else place, ranks)
    # Lightning's model comes after the callbacks, so its step is over by then.
    told_at = "3" if framework == "lightning" else "4"
    first = lives.start(lives.command("one"), STOPPED_AT=f"one:0:{told_at}")
    assert first.returncode == 143, first.stderr
    lives.lose_the_disk()
    second = lives.start(lives.command("one"))
    assert second.returncode == 0, second.stderr
    # Several ranks leave at the next step that they agree on.
    (line,) = resumed(second.stderr)
    assert int(line.split()[4].strip(":")) in range(4, 4 + ranks), second.stderr


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("ranks", [1, *nightly(2)])
def test_a_step_that_cannot_be_saved_ends_with_75_after_two_tries(framework: str, ranks: int, tmp_path: Path) -> None:
    if ranks > 1 and framework == "checkpointer":
        pytest.skip("its ranks save one file each, in the program of another test")
    lives = Lives(tmp_path, framework, "inside", ranks)
    # Of a save of its own that fails, the program would die.
    first = lives.start(lives.command("one"), STOPPED_AT="one:0:2", NO_ROOM="1", EVERY="100")
    assert first.returncode == 75, first.stderr
    assert first.stderr.count("which is not stored: the steps after 0 are lost") == ranks, first.stderr
    assert "keepstep: not durable: step " in first.stderr
    assert "keepstep: not durable: nothing was stored" in first.stderr


def test_a_loop_that_has_saved_nothing_yet_ends_with_75(tmp_path: Path) -> None:
    """`torch.distributed.checkpoint` under autoload: nobody makes a just-in-time save there."""
    loop = Path(__file__).parents[2] / "examples" / "dcp_loop.py"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
    command = (*torchrun, str(loop), "--steps", "100000", "--save-every", "100000")
    environment = {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    with RunProcess(
        tmp_path / "v", f"file://{tmp_path}/store", command=command, autoload=True, environment=environment
    ) as run:
        wait_until(lambda: "step=" in run.output(), HANG_SECONDS, "it trains")
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.output()
        assert "keepstep: not durable: nothing was stored" in run.output()


def test_a_loop_whose_saves_nobody_stores_ends_with_75(tmp_path: Path) -> None:
    """Fabric's loops are the program's own, and so are their saves."""
    pytest.importorskip("lightning.fabric")
    command = (sys.executable, str(Path(__file__).with_name("fabric_program.py")), str(tmp_path / "out"))
    with RunProcess(tmp_path / "v", f"file://{tmp_path}/store", command=command, autoload=True) as run:
        wait_until(lambda: "step=2" in run.output(), HANG_SECONDS, "it trains")
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.output()
        assert "keepstep: not durable: nothing was stored" in run.output()
