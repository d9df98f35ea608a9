"""`make demo` as a newcomer runs it, and what it says when a claim does not hold."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from examples.demo import story
from examples.demo.processes import TrainingRun

from keepstep_agent.core.errors import KeepstepError


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_loses_not_a_single_step_and_leaves_nothing_behind(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(short_directory))
    # The user's own settings take no part.
    monkeypatch.setenv("KEEPSTEP_DESTINATION", "s3://no-such-bucket/run")
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    done = subprocess.run([sys.executable, "-m", "examples.demo"], capture_output=True, text=True, timeout=1700)
    logs = "".join(path.read_text()[-1500:] for path in short_directory.rglob("*.log"))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + logs
    told, _, held = done.stdout.partition("What held")
    step = int(re.search(r"step (\d+): saved just in time", told)[1])  # type: ignore[index]
    assert step % 20, "interrupted between two periodic saves"
    assert f"restored checkpoint-{step} from the bucket" in told
    assert held.splitlines()[1:] == [
        f"  ✓ the just-in-time save is of step {step}, the very step at which the run stopped",
        "  ✓ it was committed in the bucket before `keepstep run` ended",
        "  ✓ `keepstep run` gave the program's exit code, 143: terminated, not done",
        f"  ✓ with nothing but the bucket left, training went on from step {step}",
        "  ✓ all 100 losses and the final weights are bit-identical to the undisturbed run's",
        "  ✓ all 6 checkpoints in the bucket are intact",
    ]
    assert not list(short_directory.iterdir())


def test_a_claim_that_does_not_hold_is_named_and_the_folder_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(story.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(story, "_trainer", lambda stage: [sys.executable, "-c", "raise SystemExit('no memory')"])
    assert story.run_demo(keep=False) == 1
    (folder,) = tmp_path.iterdir()
    told = capsys.readouterr().out
    assert "This did not hold: the undisturbed training runs to its end" in told
    assert str(folder) in told
    assert "no memory" in (folder / "undisturbed.log").read_text()


def test_one_bit_of_one_loss_is_noticed() -> None:
    losses = {step: float(step).hex() for step in range(1, 101)}
    undisturbed = TrainingRun(losses=losses, weights="same")
    interrupted = TrainingRun(losses={step: losses[step] for step in range(1, 48)})
    resumed = TrainingRun(losses={step: losses[step] for step in range(48, 101)}, weights="same")
    assert story._compare(undisturbed, interrupted, resumed) == 100
    resumed.losses[77] = "0x1.3400000000001p+6"
    with pytest.raises(story.ClaimError, match="step 77"):
        story._compare(undisturbed, interrupted, resumed)


def test_a_step_that_is_trained_twice_or_never_is_noticed() -> None:
    losses = {step: float(step).hex() for step in range(1, 101)}
    undisturbed = TrainingRun(losses=losses, weights="same")
    for resumed_from, message in ((47, "twice"), (49, "no loss")):
        interrupted = TrainingRun(losses={step: losses[step] for step in range(1, 48)})
        resumed = TrainingRun(losses={step: losses[step] for step in range(resumed_from, 101)}, weights="same")
        with pytest.raises(story.ClaimError, match=message):
            story._compare(undisturbed, interrupted, resumed)


def test_other_weights_are_noticed() -> None:
    losses = {1: "0x1p+0"}
    with pytest.raises(story.ClaimError, match="weights"):
        story._compare(TrainingRun(losses=losses, weights="a"), TrainingRun(), TrainingRun(losses=losses, weights="b"))


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(story.importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(KeepstepError, match="needs torch and rclone") as error:
        story.run_demo(keep=False)
    assert "`make demo`" in error.value.hint
