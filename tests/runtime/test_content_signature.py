"""The signature of an announced path: it changes with the content, stays in the volume, and survives a rotation."""

import shutil
import threading
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.adapters.volume.content_check import content_signature
from keepstep_agent.core.errors import ErrorKind, KeepstepError


def test_it_changes_when_a_file_is_added_rewritten_or_removed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1" / "deep"
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(b"1")
    seen = [content_signature(tmp_path, str(tmp_path / "checkpoint-1"))]
    assert content_signature(tmp_path, str(tmp_path / "checkpoint-1")) == seen[0]
    for change in (lambda: (folder / "b").touch(), lambda: (folder / "a").write_bytes(b"12"), (folder / "b").unlink):
        change()
        seen.append(content_signature(tmp_path, str(tmp_path / "checkpoint-1")))
    assert len(set(seen)) == 4


def test_what_the_trainer_rotates_meanwhile_is_at_most_missing(tmp_path: Path) -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for number in range(10):
                folder = tmp_path / "checkpoint" / str(number)
                folder.mkdir(parents=True)
                (folder / "data").touch()
            shutil.rmtree(tmp_path / "checkpoint")

    kinds: set[ErrorKind] = set()
    trainer = threading.Thread(target=churn)
    trainer.start()
    try:
        for _ in range(500):
            try:
                content_signature(tmp_path, str(tmp_path / "checkpoint"))
            except KeepstepError as error:
                kinds.add(error.kind)
    finally:
        stop.set()
        trainer.join(HANG_SECONDS)
    assert kinds <= {ErrorKind.FILE_MISSING}


@pytest.mark.parametrize("path", ["/", "/etc", "..", "a\0b", ""])
def test_a_path_outside_the_volume_is_refused_before_it_is_walked(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("walked")

    monkeypatch.setattr("os.walk", fail)
    with pytest.raises(KeepstepError) as caught:
        content_signature(tmp_path, path)
    assert caught.value.hint
