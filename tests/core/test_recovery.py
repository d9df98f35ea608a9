"""What a restart finds in the store is taken up, with all that the journal knows of it."""

import pytest

from keepstep_agent.core.agent import planner
from keepstep_agent.core.agent.commands import CheckSent, CreateUpload, Reconcile, Release, Stage
from keepstep_agent.core.agent.events import (
    Announced,
    Committed,
    Event,
    FileStored,
    FoundFile,
    PartStored,
    Reconciled,
    Staged,
    Started,
    UploadCreated,
    WorkFailed,
)
from keepstep_agent.core.agent.reducer import Ready, advance
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.file_lists import staged_files
from keepstep_agent.core.model import AnnouncementTime, Fingerprint, Kind, SaveInfo, StagedFile
from keepstep_agent.core.settings.values import MIB, Settings, StoreSettings, TransferSettings

INFO = SaveInfo(save="a-000001", name="checkpoint-1", step=1, kind=Kind.PERIODIC, world_size=1)
FILE = StagedFile(
    path="model.bin",
    pin=".keepstep/staged/model.bin",
    fingerprint=Fingerprint(size_bytes=16 * MIB, mtime_ns=1, inode=1),
    private=False,
)


def new_state(part_size_bytes: int = 8 * MIB) -> State:
    settings = Settings(
        volume="/volume",
        checkpoint_directory="/volume/checkpoints",
        socket="/volume/socket",
        store=StoreSettings(destination="s3://bucket/run"),
        transfer=TransferSettings(part_size_bytes=part_size_bytes),
    )
    return State(settings=settings)


def work(operation: Operation, number: int = 0, upload: str = "") -> WorkId:
    return WorkId(operation, INFO.save, 0, FILE.path, number, upload)


def restart_after(*replayed: Event, part_size_bytes: int = 8 * MIB) -> tuple[State, Ready]:
    """The setting is `part_size_bytes` now, and was 8 MiB before."""
    state = new_state(part_size_bytes)
    path = "/volume/checkpoints/checkpoint-1"
    announced = Announced(at=1.0, info=INFO, rank=0, path=path, files=(), local_world_size=1)
    stage = WorkId(Operation.STAGE, INFO.save, 0)
    staged = Staged(at=1.0, work=stage, files=staged_files([FILE]), part_size_bytes=8 * MIB)
    for event in (announced, staged, *replayed):
        advance(state, event)
    return state, advance(state, Started(at=2.0, fresh=False))


def part_stored(number: int) -> PartStored:
    sent = work(Operation.SEND_PART, number, "upload-1")
    return PartStored(at=1.0, work=sent, receipt=f"receipt-{number}", checksum=100 + number, size_bytes=8 * MIB)


def test_a_file_that_was_completed_while_the_agent_died_keeps_the_checksums_of_its_parts() -> None:
    created = UploadCreated(at=1.0, work=work(Operation.CREATE_UPLOAD), upload="upload-1")
    state, ready = restart_after(created, part_stored(1), part_stored(2))
    (reconcile,) = [command for command in ready.commands if isinstance(command, Reconcile)]
    found = FoundFile(rank=0, path=FILE.path, checksum=None)
    ready = advance(state, Reconciled(at=3.0, work=reconcile.work, uploads=(), files=(found,)))
    (check,) = [command for command in ready.commands if isinstance(command, CheckSent)]
    assert list(check.manifest.files[0].checksums) == [101, 102]
    assert state.checkpoints[INFO.save].durable_bytes == FILE.fingerprint.size_bytes


@pytest.mark.parametrize("part_size_bytes", [5 * MIB, 16 * MIB])
def test_what_was_staged_before_a_change_of_the_part_size_keeps_its_parts(part_size_bytes: int) -> None:
    created = UploadCreated(at=1.0, work=work(Operation.CREATE_UPLOAD), upload="upload-1")
    _, ready = restart_after(created, part_stored(1), part_size_bytes=part_size_bytes)
    (reconcile,) = [command for command in ready.commands if isinstance(command, Reconcile)]
    assert [(known.part_size_bytes, known.parts) for known in reconcile.unfinished] == [
        (8 * MIB, ((1, "receipt-1", 101),))
    ]

    complete = FileStored(
        at=1.0, work=work(Operation.COMPLETE_UPLOAD, 0, "upload-1"), checksum=None, size_bytes=16 * MIB
    )
    state, ready = restart_after(created, part_stored(1), part_stored(2), complete, part_size_bytes=part_size_bytes)
    (reconcile,) = [command for command in ready.commands if isinstance(command, Reconcile)]
    ready = advance(state, Reconciled(at=3.0, work=reconcile.work, uploads=(), files=()))
    (check,) = [command for command in ready.commands if isinstance(command, CheckSent)]
    (file,) = check.manifest.files
    assert (file.part_size_bytes, list(file.checksums)) == (8 * MIB, [101, 102])


def test_what_is_staged_after_a_change_of_the_part_size_has_the_new_one() -> None:
    state = new_state(16 * MIB)
    path = "/volume/checkpoints/checkpoint-1"
    advance(state, Started(at=1.0, fresh=False))
    ready = advance(state, Announced(at=1.0, info=INFO, rank=0, path=path, files=(), local_world_size=1))
    (stage,) = [command for command in ready.commands if isinstance(command, Stage)]
    assert stage.part_size_bytes == 16 * MIB


def test_a_file_stored_before_the_restart_is_not_asked_for_again() -> None:
    created = UploadCreated(at=1.0, work=work(Operation.CREATE_UPLOAD), upload="upload-1")
    complete = work(Operation.COMPLETE_UPLOAD, 0, "upload-1")
    stored = FileStored(at=1.0, work=complete, checksum=None, size_bytes=0)
    _, ready = restart_after(created, part_stored(1), part_stored(2), stored)
    (reconcile,) = [command for command in ready.commands if isinstance(command, Reconcile)]
    assert reconcile.unfinished == ()


def _found_by_its_record() -> tuple[State, Reconcile]:
    """A checkpoint that no client announced to this agent, staged."""
    state = new_state()
    path = "/volume/checkpoints/checkpoint-1"
    advance(state, Started(at=100.0, fresh=False))
    found = Announced(
        at=100.0, info=INFO, rank=0, path=path, files=(), local_world_size=1, signature="s", recorded_at=50.0
    )
    (stage,) = [command for command in advance(state, found).commands if isinstance(command, Stage)]
    assert stage.announcements == (found,)
    ready = advance(state, Staged(at=101.0, work=stage.work, files=staged_files([FILE]), part_size_bytes=8 * MIB))
    (reconcile,) = ready.commands
    assert isinstance(reconcile, Reconcile)
    return state, reconcile


def test_what_an_earlier_agent_may_have_sent_is_looked_for_before_a_byte_goes_out() -> None:
    state, reconcile = _found_by_its_record()
    assert reconcile.announced_at == ((0, AnnouncementTime(at=100.0, recorded_at=50.0)),)
    ready = advance(state, Reconciled(at=102.0, work=reconcile.work, uploads=(), files=()))
    assert [type(command) for command in ready.commands] == [CreateUpload]


def test_what_an_earlier_agent_has_committed_is_committed_and_not_sent_again() -> None:
    state, reconcile = _found_by_its_record()
    ready = advance(state, Committed(at=102.0, work=reconcile.work))
    assert state.checkpoints[INFO.save].durable
    assert [type(command) for command in ready.commands] == [Release]


def test_a_clock_that_was_ahead_before_the_restart_delays_nothing_after_it() -> None:
    state = new_state()
    path = "/volume/checkpoints/checkpoint-1"
    advance(state, Announced(at=9_000.0, info=INFO, rank=0, path=path, files=(), local_world_size=1))
    ready = advance(state, Started(at=100.0, fresh=False))
    (stage,) = [command for command in ready.commands if isinstance(command, Stage)]
    staged = advance(state, Staged(at=101.0, work=stage.work, files=staged_files([FILE]), part_size_bytes=8 * MIB))
    (create,) = staged.commands
    assert isinstance(create, CreateUpload)
    kind = ErrorKind.TIMED_OUT
    advance(state, WorkFailed(at=102.0, work=create.work, kind=kind, message="", hint="", jitter=0.0))
    wake_at = planner.next_wake(state)
    assert wake_at is not None
    assert 102.0 < wake_at < 103.0
