"""Once the deadline runs, a just-in-time save shares the wire with nobody."""

from collections.abc import Sequence

from keepstep_agent.core.agent.commands import CancelWork, Command, CompleteUpload, CreateUpload, SendPart
from keepstep_agent.core.agent.events import (
    Announced,
    Event,
    FileStored,
    PartStored,
    Staged,
    Started,
    TerminationNoticed,
    UploadCreated,
    WorkCancelled,
)
from keepstep_agent.core.agent.reducer import advance
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.file_lists import staged_files
from keepstep_agent.core.model import Fingerprint, Kind, SaveInfo, StagedFile
from keepstep_agent.core.settings.values import MIB, Settings, StoreSettings, TransferSettings

PART_BYTES = 8 * MIB


def make_state(**transfer: int) -> State:
    settings = Settings(
        volume="/volume",
        checkpoint_directory="/volume/checkpoints",
        socket="/volume/socket",
        store=StoreSettings(destination="s3://bucket/run"),
        transfer=TransferSettings(part_size_bytes=PART_BYTES, **transfer),
    )
    return State(settings=settings)


def announce(state: State, save: str, step: int, kind: Kind, parts: int) -> list[Command]:
    """Announced and staged: one file of so many parts."""
    path = f"/volume/checkpoints/checkpoint-{step}"
    info = SaveInfo(save=save, name=f"checkpoint-{step}", step=step, kind=kind, world_size=1)
    fingerprint = Fingerprint(size_bytes=parts * PART_BYTES, mtime_ns=1, inode=step)
    file = StagedFile(path="model.bin", pin=f"staged/{save}/model.bin", fingerprint=fingerprint, private=False)
    return run(
        state,
        Announced(at=1.0, info=info, rank=0, path=path, files=(), local_world_size=1),
        Staged(at=1.0, work=WorkId(Operation.STAGE, save, 0), files=staged_files([file]), part_size_bytes=PART_BYTES),
    )


def run(state: State, *events: Event) -> list[Command]:
    return [command for event in events for command in advance(state, event).commands]


def sends(commands: Sequence[Command], save: str) -> list[SendPart]:
    return [one for one in commands if isinstance(one, SendPart) and one.work.save == save]


def created(save: str) -> UploadCreated:
    work = WorkId(Operation.CREATE_UPLOAD, save, 0, "model.bin")
    return UploadCreated(at=2.0, work=work, upload=f"upload-{save}")


def stored(command: SendPart) -> PartStored:
    return PartStored(at=3.0, work=command.work, receipt="receipt", checksum=1, size_bytes=PART_BYTES)


def test_older_parts_leave_the_wire_and_come_back_only_when_the_just_in_time_save_is_stored() -> None:
    state = make_state(max_concurrency=4)
    run(state, Started(at=1.0, fresh=True))
    announce(state, "old", 1, Kind.PERIODIC, parts=8)
    assert len(sends(run(state, created("old")), "old")) == 4
    run(state, TerminationNoticed(at=2.0, deadline=100.0, source="test"))

    commands = announce(state, "new", 2, Kind.JUST_IN_TIME, parts=2)
    cancelled = [one.work for one in commands if isinstance(one, CancelWork)]
    assert len(cancelled) == 4
    commands = run(state, *(WorkCancelled(at=2.0, work=work) for work in cancelled))
    assert [type(one) for one in commands] == [CreateUpload]
    # Two places of the window are free, and stay so.
    commands = run(state, created("new"))
    assert [type(one) for one in commands] == [SendPart, SendPart]
    parts = sends(commands, "new")
    assert not sends(run(state, stored(parts[0])), "old")
    (complete,) = run(state, stored(parts[1]))
    assert isinstance(complete, CompleteUpload)

    done = FileStored(at=4.0, work=complete.work, checksum=None, size_bytes=0)
    assert len(sends(run(state, done), "old")) == 4
