"""What a process leaves to the next one of what it did when it died."""

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from keepstep_agent.adapters.volume import work_note
from keepstep_agent.adapters.volume.own_entries import AGENT_NOTE
from keepstep_agent.adapters.volume.work_note import WorkNote
from keepstep_agent.core.policies.repeated_deaths import DEATHS, Suspect, Task

_TASK = Task(doing="put-file", title="checkpoint-1 (step 1, periodic)")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


def _open(folder: Path, *, now: float = 100.0) -> WorkNote:
    return WorkNote(folder.parent / "volume", folder, AGENT_NOTE, now=now)


def _die(folder: Path, *works: str, now: float = 100.0, may_be_killed_at: float | None = None) -> WorkNote:
    """A process that dies with this work under way."""
    note = _open(folder, now=now)
    note.write(dict.fromkeys(works, _TASK), note.suspects, may_be_killed_at=may_be_killed_at)
    return note


def test_what_was_under_way_at_two_deaths_in_a_row_is_set_aside_and_said(folder: Path) -> None:
    _die(folder, "fatal", "other")
    _die(folder, "fatal")
    with capture_logs() as logs:
        suspects = _open(folder).suspects
    assert suspects == {"fatal": Suspect(deaths=DEATHS, last=_TASK, noted_at=100.0)}
    (line,) = (line for line in logs if line["event"] == "work.set_aside")
    assert (line["work"], line["title"], line["doing"]) == ("fatal", _TASK.title, _TASK.doing)
    assert "keepstep.dev/memory" in line["hint"]


def test_an_orderly_end_between_two_deaths_ends_the_row(folder: Path) -> None:
    _die(folder, "save")
    note = _open(folder)
    note.close(note.suspects)
    _die(folder, "save")
    assert _open(folder).suspects["save"].deaths == 1


def test_what_is_set_aside_outlives_an_orderly_end_for_a_day(folder: Path) -> None:
    for _ in range(DEATHS):
        _die(folder, "save")
    note = _open(folder)
    note.close(note.suspects)
    later = _open(folder, now=100.0 + 23 * 3600)
    assert later.suspects["save"].is_set_aside
    later.close(later.suspects)
    assert not _open(folder, now=100.0 + 25 * 3600).suspects


def test_a_machine_that_was_started_again_is_no_death(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _die(folder, "save")
    monkeypatch.setattr(work_note, "boot_id", lambda: "another")
    assert not _open(folder).suspects


def test_a_kill_at_the_end_of_the_grace_period_is_no_death(folder: Path) -> None:
    _die(folder, "save", may_be_killed_at=130.0)
    assert not _open(folder, now=131.0).suspects
    _die(folder, "save", now=200.0, may_be_killed_at=230.0)
    assert _open(folder, now=205.0).suspects["save"].deaths == 1, "nobody kills before the deadline"


def test_with_another_memory_limit_everything_is_begun_as_if_nothing_had_been(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(DEATHS):
        _die(folder, "save")
    monkeypatch.setattr(work_note, "memory_limit_bytes", lambda: 512 * 1024**2)
    assert not _open(folder).suspects


def test_more_than_a_page_keeps_what_killed_most_often(folder: Path) -> None:
    for _ in range(DEATHS):
        _die(folder, "fatal")
    note = _open(folder)
    note.write({f"save-{number}": _TASK for number in range(500)} | {"fatal": _TASK}, note.suspects)
    assert (folder / AGENT_NOTE).stat().st_size == 4_096
    assert _open(folder).suspects["fatal"].deaths == DEATHS + 1


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\0" * 4_096, b'{"suspects":{"a":{"deaths":-1}}}', b"[" * 4_096]
)
def test_a_note_that_cannot_be_read_is_none(folder: Path, content: bytes) -> None:
    (folder / AGENT_NOTE).write_bytes(content)
    assert not _open(folder).suspects


@pytest.mark.parametrize("kind", ["folder", "link", "pipe", "second name"])
def test_another_kind_of_file_in_its_place_is_moved_aside(folder: Path, kind: str) -> None:
    path, elsewhere = folder / AGENT_NOTE, folder / "elsewhere"
    elsewhere.write_bytes(b"not a note")
    match kind:
        case "folder":
            (path / "below").mkdir(parents=True)
        case "link":
            path.symlink_to(elsewhere)
        case "pipe":
            os.mkfifo(path)
        case _:
            path.hardlink_to(elsewhere)
    _die(folder, "save")
    assert _open(folder).suspects["save"].deaths == 1
    assert elsewhere.read_bytes() == b"not a note"


def test_without_a_state_directory_it_says_so_once_and_notes_nothing(tmp_path: Path) -> None:
    with capture_logs() as logs:
        note = WorkNote(tmp_path, tmp_path / "missing", AGENT_NOTE, now=100.0)
        note.write({"save": _TASK}, {})
        note.close({})
    assert [line["event"] for line in logs] == ["work.not_noted"]
