"""What records call output directories outside the volume, and what is said of one from which nothing can be linked."""

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

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
    directories = _directories(volume, told.append)
    assert not directories.protects(other_filesystem / folder / "checkpoint-1")
    assert told == [other_filesystem / named]
    assert f"keepstep.dev/output: {other_filesystem / named}, or with" in capsys.readouterr().err


@pytest.mark.parametrize("output", ["out", "out/fold-0", ".", "/data/out", "/"])
def test_a_directory_outside_is_told_by_what_records_call_it(output: str, volume: Path) -> None:
    recorded = _directories(volume).recorded(output)
    assert recorded.startswith("checkpoints/outside/")
    # Another process, on another machine perhaps.
    assert _directories(volume).outside_of(recorded) == Path(output)


def test_what_leads_up_or_lies_in_the_volume_is_no_directory_outside(volume: Path) -> None:
    directories = _directories(volume)
    assert directories.recorded("../out").startswith("checkpoints/outside/out-")
    for recorded in (
        directories.recorded("../out"),
        "",
        "checkpoints/out",
        "checkpoints/outside/relative/../../../etc",
    ):
        assert directories.outside_of(recorded) is None


def _directories(volume: Path, tell_unprotected: Callable[[Path], None] = lambda _: None) -> OutputDirectories:
    checkpoints = volume / "checkpoints"
    settings = Settings(
        volume=volume, checkpoint_directory=checkpoints, run_directory=checkpoints, socket=volume / "agent.sock"
    )
    return OutputDirectories(settings, tell_unprotected, _no_ranks)


def _no_ranks() -> NoReturn:
    raise AssertionError("nobody asks for the ranks here")
