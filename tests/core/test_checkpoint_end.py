"""How a checkpoint is committed, released, and what is cleaned up after one that is not."""

from dataclasses import replace

from tests.core.play import PART_BYTES, Play, staged_file

from keepstep_agent.core.agent.commands import Abandon, Commit, Stage
from keepstep_agent.core.agent.events import (
    DiskRead,
    ObjectsLost,
    PartStored,
    Reconciled,
    Staged,
    Started,
)
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.file_lists import staged_files
from keepstep_agent.core.model import Kind, Phase

_COMMIT = WorkId(Operation.COMMIT, "save")
_CREATE = WorkId(Operation.CREATE_UPLOAD, "save", 0, "r0-0")


def _until(play: Play, work: WorkId) -> None:
    while work not in play.in_flight:
        play.answer(next(iter(play.in_flight)))


def _shed(play: Play) -> None:
    """Give `save` up while it is the only one with something on the wire."""
    play.announce("wire", (PART_BYTES,) * 3)
    play.announce("newest", (PART_BYTES,) * 3)
    play.feed(DiskRead(at=play.now, used_bytes=0, free_bytes=0, total_bytes=1))
    assert play.phase("save") is Phase.SHED


def _abandon(play: Play) -> Abandon:
    command = play.in_flight[WorkId(Operation.ABANDON, "save")]
    assert isinstance(command, Abandon)
    return command


def test_files_then_manifest_then_marker_then_release() -> None:
    play = Play(max_concurrency=1)
    play.announce("save", (PART_BYTES * 2, 0))
    order = []
    while play.in_flight:
        (work,) = play.in_flight
        order.append(work.operation.value)
        play.answer(work)
    assert order == [
        "create-upload",
        "send-part",
        "send-part",
        "complete-upload",
        "put-file",
        "check-sent",
        "write-manifest",
        "commit",
        "release",
    ]


def test_a_checkpoint_without_a_file_is_one_too() -> None:
    play = Play()
    play.announce("save", ())
    play.finish()
    assert play.phase("save") is Phase.RELEASED


def test_an_object_that_the_store_lost_is_sent_again_and_nothing_else() -> None:
    play = Play()
    play.announce("save", (PART_BYTES, PART_BYTES * 2))
    _until(play, _COMMIT)
    del play.in_flight[_COMMIT]
    play.feed(ObjectsLost(at=play.now, work=_COMMIT, files=((0, "r0-0"),)))
    assert list(play.in_flight) == [WorkId(Operation.PUT_FILE, "save", 0, "r0-0")]
    play.finish()
    assert play.phase("save") is Phase.RELEASED


def test_an_upload_that_is_created_after_its_save_was_given_up_is_aborted() -> None:
    play = Play(max_concurrency=1)
    play.announce("save", (PART_BYTES * 3,))
    _shed(play)
    assert WorkId(Operation.RELEASE, "save") not in play.in_flight
    play.answer(_CREATE)
    assert [key for key, _ in _abandon(play).uploads] == ["checkpoint-1/save/r0-0"]
    assert _abandon(play).sweep_keys == ()


def test_pins_of_what_was_given_up_are_dropped_although_the_store_is_away() -> None:
    play = Play(max_concurrency=1)
    play.announce("save", (PART_BYTES * 3,))
    play.answer(_CREATE)
    _shed(play)
    for work in [work for work in play.in_flight if work.operation is Operation.SEND_PART]:
        play.cancel(work)
    play.fail(WorkId(Operation.ABANDON, "save"), ErrorKind.UNREACHABLE)
    play.answer(WorkId(Operation.RELEASE, "save"))
    assert play.state.checkpoints["save"].pins_dropped
    play.now += 60
    play.tick()
    play.answer(WorkId(Operation.ABANDON, "save"))
    assert play.state.checkpoints["save"].settled


def test_an_upload_that_may_have_been_created_is_looked_for() -> None:
    play = Play(max_concurrency=1)
    play.announce("save", (PART_BYTES * 3, 1))
    _shed(play)
    play.fail(_CREATE, ErrorKind.TIMED_OUT)
    assert _abandon(play).uploads == ()
    assert _abandon(play).sweep_keys == ("checkpoint-1/save/r0-0",)


def test_after_a_restart_what_was_given_up_is_looked_for_too() -> None:
    play = Play(max_concurrency=1)
    play.announce("save", (PART_BYTES * 3,))
    _shed(play)
    play.in_flight.clear()
    play.feed(Started(at=play.now, fresh=False))
    assert _abandon(play).sweep_keys == ("checkpoint-1/save/r0-0",)


def test_an_answer_that_was_lost_makes_the_commit_sweep() -> None:
    play = Play(max_concurrency=1)
    play.announce("save", (PART_BYTES * 3,))
    play.fail(_CREATE, ErrorKind.TIMED_OUT)
    play.now += 60
    play.tick()
    _until(play, _COMMIT)
    command = play.in_flight[_COMMIT]
    assert isinstance(command, Commit)
    assert command.sweep_uploads


def test_a_failed_save_stays_on_the_volume_until_a_newer_one_is_committed() -> None:
    play = Play()
    play.announce("save")
    play.fail(WorkId(Operation.PUT_FILE, "save", 0, "r0-0"), ErrorKind.FILE_CHANGED)
    assert play.phase("save") is Phase.FAILED
    assert not play.in_flight
    play.announce("next")
    _until(play, WorkId(Operation.RELEASE, "save"))
    assert play.phase("next") in (Phase.COMMITTED, Phase.RELEASED)


def test_pins_that_are_made_after_their_save_failed_are_dropped() -> None:
    play = Play()
    play.announce("save", world_size=2)
    # The second rank's pins are still being made when the first one's file turns out to be changed.
    play.announce_only("save", rank=1, world_size=2)
    play.fail(WorkId(Operation.PUT_FILE, "save", 0, "r0-0"), ErrorKind.FILE_CHANGED)
    play.answer(WorkId(Operation.STAGE, "save", 1))
    play.announce("next")
    _until(play, WorkId(Operation.RELEASE, "save"))


def test_after_a_restart_nothing_is_sent_before_the_store_was_asked() -> None:
    play = Play(max_concurrency=1)
    play.announce("save", (PART_BYTES * 3,))
    play.answer(_CREATE)
    play.in_flight.clear()
    play.feed(Started(at=play.now, fresh=False))
    assert list(play.in_flight) == [WorkId(Operation.RECONCILE, "save")]


def test_what_the_store_does_not_confirm_is_sent_again() -> None:
    play = Play(max_concurrency=1)
    play.announce("save", (PART_BYTES * 3,))
    play.answer(_CREATE)
    part = next(iter(play.in_flight))
    play.feed(PartStored(at=play.now, work=part, receipt="receipt", checksum=7, size_bytes=PART_BYTES))
    play.in_flight.clear()
    play.feed(Started(at=play.now, fresh=False))
    play.in_flight.clear()
    work = WorkId(Operation.RECONCILE, "save")
    play.feed(Reconciled(at=play.now, work=work, uploads=(), files=()))
    assert list(play.in_flight) == [_CREATE]
    assert play.state.checkpoints["save"].durable_bytes == 0
    play.finish()
    assert play.phase("save") is Phase.RELEASED


def test_a_file_rewritten_in_place_fails_the_older_save_that_still_needs_it() -> None:
    play = Play(max_concurrency=1)
    _two_saves_of_one_inode(play, stored=False)
    assert play.phase("old") is Phase.FAILED
    assert play.state.checkpoints["old"].error_kind is ErrorKind.FILE_CHANGED


def test_pins_of_a_failed_save_go_when_what_came_after_it_is_committed_also_at_a_lower_step() -> None:
    play = Play()
    play.steps.update(failed=1000, earlier=900)
    play.announce("failed")
    (work,) = play.in_flight
    play.fail(work, ErrorKind.FILE_CHANGED)
    assert not play.state.checkpoints["failed"].pins_dropped
    # The run fell back to an earlier checkpoint and goes on from there.
    play.announce("earlier")
    play.finish()
    assert play.state.checkpoints["failed"].pins_dropped


def test_a_file_rewritten_in_place_does_no_harm_once_it_is_stored() -> None:
    play = Play(max_concurrency=1)
    _two_saves_of_one_inode(play, stored=True)
    play.finish()
    assert play.phase("old") is Phase.RELEASED


def _stage_of(play: Play, save: str) -> Stage:
    command = play.in_flight[WorkId(Operation.STAGE, save, 0)]
    assert isinstance(command, Stage)
    return command


def test_after_a_file_was_found_changed_its_trainers_next_saves_are_copied() -> None:
    play = Play()
    play.announce("failed")
    play.fail(WorkId(Operation.PUT_FILE, "failed", 0, "r0-0"), ErrorKind.FILE_CHANGED)
    play.announce_only("next")
    assert _stage_of(play, "next").private
    # Also after a restart.
    play.in_flight.clear()
    play.feed(Started(at=play.now, fresh=False))
    assert _stage_of(play, "next").private


def test_a_file_that_was_pinned_from_the_same_path_before_is_copied_and_so_is_all_that_follows() -> None:
    play = Play()
    play.steps.update(first=7, second=7, third=7)
    play.announce("first")
    play.finish()
    play.announce_only("second")
    stage = _stage_of(play, "second")
    linked = play.state.checkpoints["first"].contributions[0].linked_inodes()
    assert linked
    assert (stage.private, stage.rewritten_inodes) == (False, linked)
    del play.in_flight[stage.work]
    copied = replace(staged_file("r0-0", 1, inode=77), private=True)
    play.feed(Staged(at=play.now, work=stage.work, files=staged_files([copied]), part_size_bytes=PART_BYTES))
    play.announce_only("third")
    assert _stage_of(play, "third").private
    play.announce_only("beside it")
    assert not _stage_of(play, "beside it").private


def test_a_file_that_could_not_be_linked_is_not_taken_for_one_that_is_rewritten() -> None:
    play = Play()
    play.steps.update(first=7, again=7)
    play.announce_only("first")
    stage = _stage_of(play, "first")
    del play.in_flight[stage.work]
    copied = replace(staged_file("r0-0", 1, inode=77), private=True)
    play.feed(Staged(at=play.now, work=stage.work, files=staged_files([copied]), part_size_bytes=PART_BYTES))
    play.announce_only("again")
    assert not _stage_of(play, "again").private


def test_what_a_trainer_changed_says_nothing_of_what_others_write_beside_it() -> None:
    play = Play()
    play.sources.update(last="/volume/checkpoints/last.ckpt", again="/volume/checkpoints/last.ckpt")
    play.announce("last")
    play.fail(WorkId(Operation.PUT_FILE, "last", 0, "r0-0"), ErrorKind.FILE_CHANGED)
    play.announce_only("periodic")
    assert not _stage_of(play, "periodic").private
    play.announce_only("again")
    assert _stage_of(play, "again").private


def test_what_comes_from_another_path_is_linked() -> None:
    play = Play()
    play.announce("first")
    play.finish()
    play.announce_only("second")
    stage = _stage_of(play, "second")
    assert (stage.private, stage.rewritten_inodes) == (False, frozenset())


def _two_saves_of_one_inode(play: Play, *, stored: bool) -> None:
    """The second save is the first one's file with other content."""
    for save, mtime_ns in (("old", 1), ("new", 2)):
        play.announce_only(save, kind=Kind.PERIODIC)
        work = WorkId(Operation.STAGE, save, 0)
        del play.in_flight[work]
        file = staged_file("r0-0", 1, inode=5, mtime_ns=mtime_ns)
        play.feed(Staged(at=play.now, work=work, files=staged_files([file]), part_size_bytes=PART_BYTES))
        if stored and save == "old":
            play.answer(WorkId(Operation.PUT_FILE, "old", 0, "r0-0"))
