"""Snapshots in the agent: beside announced checkpoints, and never in their place."""

from dataclasses import replace

import pytest
from tests.core.play import PART_BYTES, Play

from keepstep_agent.core.agent.announcements import check_announcement
from keepstep_agent.core.agent.commands import Commit
from keepstep_agent.core.agent.events import (
    Announced,
    DiskRead,
    OutputLooked,
    SnapshotNoted,
    Started,
    StopRequested,
    TerminationNoticed,
)
from keepstep_agent.core.agent.reducer import step
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import ErrorKind, RequestError
from keepstep_agent.core.model import FileEntry, Kind, Owner, Phase, RankManifest
from keepstep_agent.runtime.engine.event_codec import decode_event, encode_event

KEPT = FileEntry(
    path="out/kept",
    size_bytes=3,
    part_size_bytes=8,
    checksums=(7,),
    owner=Owner(name="node-0", save="earlier", rank=0, path="out/kept"),
    modified_ns=5,
)
LINK = FileEntry(path="out/latest", size_bytes=0, part_size_bytes=1, checksums=(), link="kept")


def manifest_of(play: Play, save: str) -> RankManifest:
    """Return the part of the manifest that the save's commit was asked for with."""
    commit = play.in_flight[WorkId(Operation.COMMIT, save)]
    assert isinstance(commit, Commit)
    return commit.ranks[0]


def seal(play: Play, save: str) -> None:
    """Answer everything until the commit is all that is left."""
    while (works := [work for work in play.in_flight if work.save == save])[0].operation is not Operation.COMMIT:
        play.answer(works[0])


def test_the_manifest_has_what_was_sent_and_what_was_kept() -> None:
    play = Play()
    play.take_snapshot("one", (5, 6), kept=(KEPT, LINK))
    seal(play, "one")
    manifest = manifest_of(play, "one")
    assert [entry.path for entry in manifest.files] == ["out/kept", "out/latest", "out/one-0", "out/one-1"]
    assert [entry.path for entry in manifest.own_files] == ["out/one-0", "out/one-1"]
    assert {entry.modified_ns for entry in manifest.own_files} == {1}
    play.finish()
    assert play.phase("one") is Phase.RELEASED


def test_a_file_that_could_not_be_pinned_keeps_its_last_version_and_so_does_what_was_deleted() -> None:
    play = Play()
    last = replace(KEPT, path="out/one-1", owner=Owner(name="node-0", save="earlier", rank=0, path="out/one-1"))
    deleted = replace(KEPT, path="out/deleted")
    play.take_snapshot("one", (5, 6), kept=(LINK,), instead=(last, deleted), pinned=1)
    seal(play, "one")
    manifest = manifest_of(play, "one")
    assert [entry.path for entry in manifest.own_files] == ["out/one-0"]
    assert set(manifest.files) == {LINK, *manifest.own_files, last, deleted}
    play.take_snapshot("two", (5, 6), kept=(LINK,), instead=(replace(last, path="out/two-1"), deleted))
    seal(play, "two")
    assert {entry.path for entry in manifest_of(play, "two").files} == {"out/latest", "out/two-0", "out/two-1"}


@pytest.mark.parametrize("is_noted_first", [True, False])
def test_of_a_released_snapshot_that_the_mirror_has_noted_no_file_is_remembered(is_noted_first: bool) -> None:
    play = Play()
    play.take_snapshot("one", (5, 6), kept=(KEPT,))
    if is_noted_first:
        play.feed(SnapshotNoted(at=play.now, save="one"))
    play.finish()
    contribution = play.state.checkpoints["one"].contributions[0]
    if not is_noted_first:
        assert len(contribution.files) == 2
        play.feed(SnapshotNoted(at=play.now, save="one"))
    assert not contribution.files
    snapshot = contribution.announced.snapshot
    assert snapshot is not None
    assert not (*snapshot.files, *snapshot.kept)


def test_a_snapshot_that_sends_nothing_is_committed() -> None:
    play = Play()
    play.take_snapshot("one", (), kept=(KEPT,))
    play.finish()
    assert play.phase("one") is Phase.RELEASED
    assert play.state.newest_snapshot is play.state.checkpoints["one"]


def test_neither_kind_is_taken_for_the_newest_of_the_other() -> None:
    play = Play()
    play.announce("saved")
    play.take_snapshot("taken")
    play.finish()
    assert play.state.newest_committed is play.state.checkpoints["saved"]
    assert play.state.newest_snapshot is play.state.checkpoints["taken"]
    for number in range(20):
        play.take_snapshot(f"later-{number}")
        play.finish()
    assert play.state.newest_committed is play.state.checkpoints["saved"]


def test_a_newer_snapshot_sheds_no_announced_checkpoint() -> None:
    play = Play()
    play.announce("saved")
    play.take_snapshot("taken")
    play.feed(DiskRead(at=play.now, used_bytes=10**9, free_bytes=0, total_bytes=10**9))
    assert play.phase("saved") is not Phase.SHED
    assert play.phase("taken") is not Phase.SHED


def test_a_just_in_time_save_goes_before_a_snapshot_that_came_later() -> None:
    play = Play(max_concurrency=1)
    play.feed(TerminationNoticed(at=play.now, deadline=play.now + 30, source="test"))
    play.announce("saved", (PART_BYTES,) * 3, kind=Kind.JUST_IN_TIME)
    play.take_snapshot("taken", (PART_BYTES,) * 3)
    play.feed(StopRequested(at=play.now, trainers_gone=True))
    order: list[str] = []
    while play.exit is None:
        order += play.transfers()
        play.answer(next(iter(play.in_flight)))
    assert order == sorted(order)
    assert play.exit.code == 0


def test_the_agent_leaves_with_75_if_either_kind_is_not_durable() -> None:
    for lost in ("saved", "taken"):
        play = Play()
        play.announce("saved", ())
        play.take_snapshot("taken", ())
        work = next(work for work in play.in_flight if work.save == lost)
        play.fail(work, ErrorKind.FILE_CHANGED)
        play.finish()
        play.feed(StopRequested(at=play.now, trainers_gone=True))
        assert play.exit is not None
        assert play.exit.code == 75
        assert len(play.exit.lost) == 1


def test_the_agent_leaves_with_75_and_a_line_if_files_are_in_no_snapshot() -> None:
    play = Play()
    play.take_snapshot("taken")
    play.finish()
    play.feed(OutputLooked(at=play.now, not_stored=("out/torn.pt: it is cut short",)))
    play.feed(StopRequested(at=play.now, trainers_gone=True))
    assert play.exit is not None
    assert (play.exit.code, play.exit.lost) == (75, ("out/torn.pt: it is cut short",))


def test_nothing_was_found_is_said_only_if_nothing_is_announced_either() -> None:
    nothing = "nothing was stored"
    play = Play()
    play.feed(StopRequested(at=play.now, trainers_gone=True, nothing_found=nothing))
    assert play.exit is not None
    assert (play.exit.code, play.exit.lost) == (75, (nothing,))

    # By this agent or, as the journal tells, by the one before it.
    play = Play()
    play.announce("saved")
    play.finish()
    play.feed(Started(at=play.now, fresh=False))
    play.feed(StopRequested(at=play.now, trainers_gone=True, nothing_found=nothing))
    assert play.exit is not None
    assert (play.exit.code, play.exit.lost) == (0, ())


def test_only_the_agent_takes_snapshots() -> None:
    play = Play()
    play.take_snapshot("taken")
    (event,) = (event for event in play.journal if isinstance(event, Announced))
    for forged in (
        replace(event, info=replace(event.info, save="other"), snapshot=None),
        replace(event, info=replace(event.info, save="other", kind=Kind.PERIODIC)),
    ):
        with pytest.raises(RequestError, match="only the agent takes snapshots"):
            check_announcement(play.state, forged)


def test_a_snapshot_on_its_way_goes_on_after_a_restart() -> None:
    play = Play()
    play.take_snapshot("taken", (5,), kept=(KEPT, LINK))
    state = State(settings=play.state.settings)
    for event in play.journal:
        step(state, decode_event(encode_event(event)))
    play.state, play.in_flight = state, {}
    play.feed(Started(at=play.now, fresh=False))
    seal(play, "taken")
    assert [entry.path for entry in manifest_of(play, "taken").files] == ["out/kept", "out/latest", "out/taken-0"]


def test_a_snapshot_whose_base_was_pruned_fails_for_good() -> None:
    play = Play()
    play.take_snapshot("taken")
    play.fail(next(iter(play.in_flight)), ErrorKind.BASE_PRUNED)
    assert play.phase("taken") is Phase.FAILED
    assert play.state.checkpoints["taken"].error_kind is ErrorKind.BASE_PRUNED
