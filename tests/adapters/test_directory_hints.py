"""Hints that a directory has changed, where the kernel gives none for a while."""

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.harness.bounds import HANG_SECONDS
from watchdog.observers import Observer

from keepstep_agent.adapters.output.directory_hints import DirectoryHints

_MODULE = "keepstep_agent.adapters.output.directory_hints"


class _NoneLeft:
    """An observer that may watch nothing more."""

    def schedule(self, *_: object, **__: object) -> None:
        raise OSError(28, "inotify watch limit reached")


def test_hints_come_again_once_the_kernel_has_room_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{_MODULE}._RETRY_SECONDS", 0.0, raising=False)
    monkeypatch.setattr(f"{_MODULE}.Observer", _NoneLeft)
    noticed = threading.Event()
    hints = DirectoryHints(tmp_path, noticed.set, ignored=lambda path: False)
    try:
        with capture_logs() as logs:
            for _ in range(3):
                hints.follow()
            monkeypatch.setattr(f"{_MODULE}.Observer", Observer)
            hints.follow()
        (tmp_path / "new").touch()
        assert noticed.wait(HANG_SECONDS)
    finally:
        hints.close()
    assert [line["event"] for line in logs] == ["watch.events_unavailable", "watch.events_available"]


def test_a_closed_one_follows_nothing_any_more(tmp_path: Path) -> None:
    hints = DirectoryHints(tmp_path, lambda: None, ignored=lambda path: False)
    hints.close()
    hints.follow()
    assert not any(thread.name.startswith("inotify") for thread in threading.enumerate())


def test_files_at_any_depth_give_hints_but_ignored_ones_do_not(tmp_path: Path) -> None:
    below = tmp_path / "a/b"
    below.mkdir(parents=True)
    asked: list[str] = []
    noticed: list[None] = []
    changed = threading.Event()

    def is_log(path: str) -> bool:
        asked.append(path)
        return path.endswith(".log")

    def notify() -> None:
        noticed.append(None)
        changed.set()

    hints = DirectoryHints(tmp_path, notify, ignored=is_log)
    try:
        hints.follow()
        (below / "train.log").write_text("1")
        (below / "ckpt").write_text("1")
        assert changed.wait(HANG_SECONDS)
    finally:
        hints.close()
    logs = [path for path in asked if path.endswith("train.log")]
    assert logs
    assert len(noticed) == len(asked) - len(logs)


def test_a_folder_that_took_the_place_of_another_one_ends_no_hints(tmp_path: Path) -> None:
    """As a checkpoint that is saved again, once both are deleted."""
    place, aside = tmp_path / "watched" / "checkpoint", tmp_path / "aside"
    place.mkdir(parents=True)
    noticed = threading.Event()
    hints = DirectoryHints(tmp_path / "watched", noticed.set, ignored=lambda path: False)
    try:
        hints.follow()
        for change in (lambda: place.rename(aside), place.mkdir, (place / "model").touch, lambda: shutil.rmtree(place)):
            noticed.clear()
            change()
            assert noticed.wait(HANG_SECONDS)
        aside.rmdir()
        for name in ("one", "more"):
            noticed.clear()
            (tmp_path / "watched" / name).touch()
            assert noticed.wait(HANG_SECONDS)
    finally:
        hints.close()


_TWICE = """
import sys
from watchdog.observers.inotify_c import InotifyConstants, InotifyFD
import keepstep_agent.adapters.output.directory_hints
watches = InotifyFD.get_instance()
for _ in range(2):
    watches.add_callback(sys.argv[1].encode(), InotifyConstants.IN_CREATE, print, "one")
"""


def test_a_new_folder_that_is_heard_of_twice_causes_no_warning(tmp_path: Path) -> None:
    """As watchdog does when a folder appears in a folder that it has just begun to watch."""
    command = (sys.executable, "-c", _TWICE, str(tmp_path))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=True)
    assert ended.stderr == ""
