"""What is said of an output directory from which nothing can be linked into the volume."""

from pathlib import Path

import pytest

from keepstep.framework_run.output_directories import OutputDirectories
from keepstep.settings import Settings


@pytest.mark.parametrize(
    ("folder", "named"), [("out", "out"), ("out/checkpoints", "out"), ("checkpoints", "")], ids=lambda folder: folder
)
def test_the_annotation_that_is_named_is_one_that_a_pod_may_have(
    folder: str,
    named: str,
    volume: Path,
    other_filesystem: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No directory of `keepstep.dev/output` may be called as the checkpoint directory."""
    monkeypatch.setenv("KEEPSTEP_START", "container")
    told: list[Path] = []
    checkpoints = volume / "checkpoints"
    settings = Settings(
        volume=volume, checkpoint_directory=checkpoints, run_directory=checkpoints, socket=volume / "agent.sock"
    )
    directories = OutputDirectories(settings, told.append)
    assert not directories.protects(other_filesystem / folder / "checkpoint-1")
    assert told == [other_filesystem / named]
    assert f"keepstep.dev/output: {other_filesystem / named}, or with" in capsys.readouterr().err
