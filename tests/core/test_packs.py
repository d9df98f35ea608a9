"""A save of many small files, from its announcement to its manifest."""

from tests.core.play import PART_BYTES, Play

from keepstep_agent.core.agent.commands import CheckSent, Commit, PutFile, PutPack, Reconcile
from keepstep_agent.core.agent.events import ObjectsLost, Started
from keepstep_agent.core.agent.reducer import advance
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.model import Kind, Phase
from keepstep_agent.core.settings.values import MIB
from keepstep_agent.core.stored.packs_and_parts import PACK_BYTES
from keepstep_agent.runtime.engine.event_codec import decode_event, encode_event

_SMALL = (100 * 1024,) * 100
_PACKS = 3


def _packs_in_flight(play: Play) -> list[PutPack]:
    return [command for command in play.in_flight.values() if isinstance(command, PutPack)]


def test_many_small_files_take_few_requests_and_each_file_is_in_the_manifest_with_its_place() -> None:
    play = Play(max_concurrency=8)
    play.announce("s1", (*_SMALL, 2 * MIB))
    packs = _packs_in_flight(play)
    assert [command.key for command in packs] == [
        f"checkpoint-1/s1/.keepstep/pack-00000-{number:05d}.tar" for number in range(_PACKS)
    ]
    assert all(command.pack.size_bytes <= PACK_BYTES for command in packs)
    assert [command.key for command in play.in_flight.values() if isinstance(command, PutFile)] == [
        "checkpoint-1/s1/r0-100"
    ]
    for command in list(play.in_flight.values()):
        play.answer(command.work)  # type: ignore[union-attr]
    (check,) = [command for command in play.in_flight.values() if isinstance(command, CheckSent)]
    manifest = check.manifest
    assert manifest.pack_sizes_bytes == tuple(command.pack.size_bytes for command in packs)
    assert len(manifest.files) == 101
    placed = {file.path: (file.place.number, file.place.offset_bytes) for file in manifest.files if file.place}
    assert placed == {
        file.path: (command.pack.number, offset_bytes)
        for command in packs
        for file, offset_bytes in zip(command.pack.files, command.pack.offsets_bytes, strict=True)
    }
    assert play.state.checkpoints["s1"].remaining_bytes == 0
    play.finish()
    assert play.phase("s1") is Phase.RELEASED


def test_bytes_are_counted_as_those_of_the_files() -> None:
    play = Play(max_concurrency=1)
    play.announce("s1", _SMALL)
    (command,) = _packs_in_flight(play)
    play.answer(command.work)
    assert play.state.checkpoints["s1"].durable_bytes == len(command.pack.files) * _SMALL[0]
    assert play.state.stored_bytes == len(command.pack.files) * _SMALL[0]


def test_a_pack_that_failed_is_sent_again_and_one_whose_file_was_changed_fails_its_checkpoint_alone() -> None:
    play = Play(max_concurrency=1)
    play.announce("s1", _SMALL)
    (first,) = _packs_in_flight(play)
    play.fail(first.work)
    play.finish()
    play.wait_until(lambda: first.work in play.in_flight)
    play.announce("s2", _SMALL)
    play.fail(first.work, ErrorKind.FILE_CHANGED)
    assert play.phase("s1") is Phase.FAILED
    play.finish()
    assert play.phase("s2") is Phase.RELEASED


def test_a_newer_save_goes_before_the_packs_that_were_not_begun() -> None:
    play = Play(max_concurrency=1)
    play.announce("s1", _SMALL)
    (first,) = _packs_in_flight(play)
    play.announce("s2", (PART_BYTES,), kind=Kind.JUST_IN_TIME)
    play.answer(first.work)
    assert play.transfers() == ["s2"]


def _restarted(play: Play) -> tuple[State, Reconcile]:
    state = State(settings=play.state.settings)
    for event in play.journal:
        advance(state, decode_event(encode_event(event)))
    ready = advance(state, Started(at=play.now, fresh=False))
    (reconcile,) = [command for command in ready.commands if isinstance(command, Reconcile)]
    return state, reconcile


def test_after_a_crash_only_the_packs_that_were_not_stored_are_sent_and_they_are_the_same() -> None:
    play = Play(max_concurrency=8)
    play.announce("s1", _SMALL)
    sent = {command.work: command for command in _packs_in_flight(play)}
    stored = WorkId(Operation.PUT_PACK, "s1", 0, number=1)
    play.answer(stored)
    play.state, reconcile = _restarted(play)
    assert reconcile.unfinished == ()
    play.in_flight = {reconcile.work: reconcile}
    play.answer(reconcile.work)
    again = {command.work: command for command in _packs_in_flight(play)}
    assert again == {work: command for work, command in sent.items() if work != stored}
    play.finish()
    assert play.phase("s1") is Phase.RELEASED


def test_a_pack_that_the_store_has_lost_is_sent_again_and_its_manifest_too() -> None:
    play = Play(max_concurrency=8)
    play.announce("s1", _SMALL)
    while not any(isinstance(command, Commit) for command in play.in_flight.values()):
        play.answer(next(iter(play.in_flight)))
    commit = WorkId(Operation.COMMIT, "s1")
    del play.in_flight[commit]
    play.feed(ObjectsLost(at=play.now, work=commit, packs=((0, 2),)))
    (again,) = _packs_in_flight(play)
    assert again.work.number == 2
    assert play.state.checkpoints["s1"].remaining_bytes == len(again.pack.files) * _SMALL[0]
    play.answer(again.work)
    assert [work.operation for work in play.in_flight] == [Operation.CHECK_SENT]
    play.finish()
    assert play.phase("s1") is Phase.RELEASED
