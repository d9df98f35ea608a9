"""A save that killed two starts while it was read is left in the journal and on the volume, and read later."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.core.play import PART_BYTES, Play, settings
from tests.fakes.fake_journal import FakeJournal

from keepstep_agent.adapters.volume.staging_area import LocalStagingArea
from keepstep_agent.core.agent.events import Announced, DurableEvent
from keepstep_agent.core.errors import ErrorKind, VolumeError
from keepstep_agent.core.model import Kind, SaveInfo
from keepstep_agent.core.policies.repeated_deaths import JOURNAL, Suspect
from keepstep_agent.ports import StagedDescriptor, StageRequest
from keepstep_agent.runtime.engine import event_codec, journaling
from keepstep_agent.runtime.engine.event_codec import decode_event, encode_event
from keepstep_agent.runtime.engine.journaling import compact, recall, recover


@dataclass
class _Note:
    """`read`: what was noted, in order."""

    left_out: Collection[str] = ()
    suspects: Mapping[str, Suspect] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)

    def reads(self, work: str, title: str = "") -> None:
        self.read.append(work)


def _journal() -> FakeJournal:
    play = Play()
    for save in ("first", "fatal", "last"):
        play.announce(save, (PART_BYTES,))
    journal = FakeJournal()
    journal.append([encode_event(event) for event in play.journal])
    return journal


def _stage(staging: LocalStagingArea, tmp_path: Path) -> Announced:
    """Pin a save `fatal`."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "model").write_bytes(b"weights")
    announced = Announced(
        at=1.0,
        info=SaveInfo(save="fatal", name="checkpoint-1", step=1, kind=Kind.PERIODIC, world_size=1),
        rank=0,
        path=str(tmp_path / "checkpoints"),
        files=("model",),
        local_world_size=1,
    )
    descriptor = StagedDescriptor(announcements=(encode_event(announced).decode(),))
    staging.stage(
        StageRequest(
            save="fatal", rank=0, path=announced.path, files=announced.files, private=False, descriptor=descriptor
        )
    )
    return announced


def test_its_records_are_not_decoded_and_stay_through_compaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = _journal()
    decoded: list[bytes] = []

    def decode(record: bytes) -> DurableEvent:
        decoded.append(record)
        return decode_event(record)

    monkeypatch.setattr(journaling, "decode_event", decode)
    state, _ = recover(settings(), journal, LocalStagingArea(tmp_path), _Note(left_out={"fatal"}))
    assert state.checkpoints.keys() == {"first", "last"}
    compact(state, journal)
    assert not [record for record in decoded if b"fatal" in record]
    events = recall(settings(), journal, LocalStagingArea(tmp_path), "fatal")
    assert [type(event).__name__ for event in events] == ["Announced", "Staged"]


def test_a_large_record_is_noted_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_codec, "_LARGE_BYTES", 0)
    note = _Note()
    recover(settings(), _journal(), LocalStagingArea(tmp_path), note)
    assert [work for work in note.read if work != JOURNAL] == ["first", "first", "fatal", "fatal", "last", "last"]
    assert note.read[-1] == JOURNAL


def test_a_journal_that_kills_as_a_whole_is_moved_aside_and_kept(tmp_path: Path) -> None:
    journal = _journal()
    state, _ = recover(settings(), journal, LocalStagingArea(tmp_path), _Note(left_out={JOURNAL}))
    assert not state.checkpoints
    assert len(journal.aside) == 1


def test_one_that_only_its_pins_tell_of_is_journaled_when_it_is_read(tmp_path: Path) -> None:
    staging = LocalStagingArea(tmp_path)
    _stage(staging, tmp_path)
    journal = FakeJournal()
    state, _ = recover(settings(), journal, staging, _Note(left_out={"fatal"}))
    assert not state.checkpoints
    assert [type(event).__name__ for event in recall(settings(), journal, staging, "fatal")] == ["Announced", "Staged"]
    state, _ = recover(settings(), journal, LocalStagingArea(tmp_path))
    assert state.checkpoints["fatal"].any_staged


def test_one_with_a_damaged_record_is_known_by_its_pins(tmp_path: Path) -> None:
    journal, staging = FakeJournal(), LocalStagingArea(tmp_path)
    announced = _stage(staging, tmp_path)
    journal.append([encode_event(announced), encode_event(announced).replace(b"checkpoint-1", b"checkpoint-2", 1)])
    state, _ = recover(settings(), journal, staging, _Note(left_out={"fatal"}))
    with capture_logs() as logs:
        events = recall(settings(), journal, staging, "fatal")
    assert [type(event).__name__ for event in events] == ["Announced", "Staged"]
    assert [(line["event"], line["save"]) for line in logs if line["log_level"] == "error"] == [
        ("journal.unreadable", "fatal")
    ]
    state, _ = recover(settings(), journal, LocalStagingArea(tmp_path))
    assert state.checkpoints["fatal"].any_staged
    assert not journal.aside


class _ReadOnceInVain(FakeJournal):
    """Its second reading fails: the first is at the start."""

    readings = 0

    def replay(self) -> Iterator[bytes]:
        self.readings += 1
        if self.readings == 2:
            raise VolumeError(ErrorKind.VOLUME_UNUSABLE, "an I/O error")
        return super().replay()


def test_a_volume_that_cannot_be_read_for_a_moment_costs_no_record(tmp_path: Path) -> None:
    journal, staging = _ReadOnceInVain(), LocalStagingArea(tmp_path)
    records = list(_journal().replay())
    journal.append(records)
    assert list(journal.replay()) == records
    with pytest.raises(VolumeError):
        recall(settings(), journal, staging, "fatal")
    assert list(journal.replay()) == records
    assert recall(settings(), journal, staging, "fatal")


def test_it_keeps_its_place_among_those_that_are_read(tmp_path: Path) -> None:
    state, _ = recover(settings(), _journal(), LocalStagingArea(tmp_path), _Note(left_out={"fatal"}))
    first, last = (state.checkpoints[save].sequence for save in ("first", "last"))
    assert first < state.unread["fatal"] < last
