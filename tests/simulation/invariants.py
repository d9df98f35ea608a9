"""What no life may show, as far as one agent can see it; the rest is in the store model and in `life.py`."""

from collections.abc import Iterable

from tests.simulation.scenario import PlannedAnnouncement
from tests.simulation.store_model import StoreModel, ViolationError

from keepstep_agent.core.agent.checkpoint import Checkpoint
from keepstep_agent.core.agent.commands import (
    Command,
    CompleteUpload,
    CreateUpload,
    Exit,
    PutFile,
    PutPack,
    Record,
    SendPart,
)
from keepstep_agent.core.agent.disk_pressure import budget_bytes
from keepstep_agent.core.agent.drain import newest_possible, worth_sending
from keepstep_agent.core.agent.events import (
    DurableEvent,
    Failed,
    FileStored,
    ObjectsLost,
    PackStored,
    PartStored,
    Reconciled,
    Shed,
)
from keepstep_agent.core.agent.planner import follow_up
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.agent.work import CANCELLABLE, Operation, WorkId
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.model import Kind, Phase
from keepstep_agent.core.stored.object_layout import marker_key

_Transfer = CreateUpload | SendPart | PutFile | PutPack | CompleteUpload


class AgentChecks:
    """Looks at every turn of one agent, across its crashes."""

    def __init__(self, index: int) -> None:
        self.acked: dict[str, dict[int, PlannedAnnouncement]] = {}
        # Saves that were made to fail in a way that no retry mends.
        self.broken: set[str] = set()
        self._index = index
        self._stored_parts: set[WorkId] = set()
        self._stored_packs: set[WorkId] = set()
        self._stored_files: set[tuple[str, str]] = set()
        # Newest save -> older ones that had the wire while it waited.
        self._went_before: dict[str, set[str]] = {}

    def acknowledged(self, planned: PlannedAnnouncement) -> None:
        self.acked.setdefault(planned.info.save, {})[planned.rank] = planned

    def sending_file(self, work: WorkId) -> None:
        if (work.save, work.path) in self._stored_files:
            raise ViolationError(f"{work.path} of {work.save} is stored and was sent again")

    def decided(self, state: State, events: Iterable[DurableEvent], store: StoreModel) -> None:
        """What has just become true, whether or not it is in the journal yet."""
        for event in events:
            match event:
                case ObjectsLost():
                    self._lost(event)
                case Shed():
                    self._shed(state, event)
                case Failed():
                    if event.save not in self.broken:
                        raise ViolationError(f"{event.save} failed without a cause: {event.reason}")
                    if marker_key(state.checkpoints[event.save].info) in store.objects:
                        raise ViolationError(f"{event.save} failed though it is committed")
                    if event.kind is ErrorKind.DISK_FULL:
                        # Its ranks were told: what is announced after this is another try.
                        self.acked.pop(event.save, None)
                case _:
                    pass

    def journaled(self, events: Iterable[DurableEvent]) -> None:
        for event in events:
            match event:
                case PartStored():
                    self._stored_parts.add(event.work)
                case FileStored():
                    self._stored_files.add((event.work.save, event.work.path))
                case Reconciled():
                    self._stored_files.update((event.work.save, file.path) for file in event.files)
                case PackStored():
                    self._stored_packs.add(event.work)
                case ObjectsLost():
                    self._lost(event)
                case _:
                    pass

    def _lost(self, event: ObjectsLost) -> None:
        self._stored_packs -= {
            WorkId(Operation.PUT_PACK, event.work.save, rank, number=number) for rank, number in event.packs
        }
        self._stored_files.difference_update((event.work.save, path) for _, path in event.files)

    def _shed(self, state: State, event: Shed) -> None:
        checkpoint = state.checkpoints[event.save]
        newer = [other for other in state.checkpoints.values() if other.sequence > checkpoint.sequence]
        if checkpoint.info.kind is Kind.JUST_IN_TIME:
            raise ViolationError(f"{event.save} was shed though it is just-in-time")
        if not any(other.phase is not Phase.FAILED for other in newer):
            raise ViolationError(f"{event.save} was shed though it is the newest")
        given_up_elsewhere = (
            checkpoint.waits_for_others or len(checkpoint.contributions) < checkpoint.expected_local_ranks
        )
        under_pressure = budget_bytes(state) == 0
        given_up = given_up_elsewhere or checkpoint.set_aside is not None
        if not under_pressure and not (given_up and any(other.durable for other in newer)):
            raise ViolationError(f"{event.save} was shed without need")

    def commands(self, state: State, commands: Iterable[Command]) -> None:
        for save in [save for save in self._went_before if not state.checkpoints[save].sends]:
            # Its wait is over; a rank that announces later begins another.
            del self._went_before[save]
        for command in commands:
            if isinstance(command, SendPart) and command.work in self._stored_parts:
                raise ViolationError(f"{command.work} is stored and was sent again")
            if isinstance(command, PutPack) and command.work in self._stored_packs:
                raise ViolationError(f"{command.work} is stored and was sent again")
            if isinstance(command, PutFile | CreateUpload):
                self.sending_file(command.work)
            if isinstance(command, _Transfer):
                self._wire(state, command.work)

    def _wire(self, state: State, work: WorkId) -> None:
        """While the newest has something to send, at most one older save goes before it, and none in a drain."""
        newest = _newest_to_send(state)
        sent = state.checkpoints[work.save]
        if newest is None or not newest.pending or sent.sequence >= newest.sequence or sent.ended:
            return
        if sent.info.kind is Kind.JUST_IN_TIME:
            return
        if state.breaker.is_open and not (newest.info.kind is Kind.JUST_IN_TIME and state.termination.noticed):
            # A single request asks whether the store is back, and each has its turn.
            return
        before = self._went_before.setdefault(newest.info.save, set())
        before.add(work.save)
        if len(before) > 1 or newest.info.kind in (Kind.JUST_IN_TIME, Kind.FINAL) or state.termination.noticed:
            raise ViolationError(f"{sorted(before)} had the wire while {newest.info.save} waited")

    def newest_is_sent(self, state: State) -> None:
        """Whatever hangs: while it has something ready, no place on the wire is free."""
        newest = _newest_to_send(state)
        if newest is None or not newest.pending or state.breaker.is_open or state.termination.exiting:
            return
        has_last_save = state.termination.noticed and any(one.info.kind is Kind.JUST_IN_TIME for one in state.sending)
        if not has_last_save and len(state.transfers) < int(state.window):
            raise ViolationError(f"{newest.info.save} waits and a place is free: {sorted(state.in_flight)}")
        sending = {work.save for work in state.transfers - state.cancelling if work.operation in CANCELLABLE}
        older = sending - {newest.info.save}
        if len(older) > 1 and not state.termination.noticed:
            raise ViolationError(f"{sorted(older)} share the wire with {newest.info.save}")

    def nothing_overlooked(self, state: State) -> None:
        """Looking at every checkpoint again finds nothing that looking at the changed ones has not."""
        known = list(state.checkpoints.values())
        listed = [
            (state.unfinished.values(), [checkpoint for checkpoint in known if not checkpoint.ended]),
            (state.sending, sorted((one for one in known if one.sends), key=lambda one: one.urgency)),
            (_in_order(state.tidying.values()), [one for one in known if one.ended and not one.settled]),
            (_in_order(state.settled.values()), [one for one in known if one.settled]),
        ]
        for kept, found in listed:
            if [checkpoint.info.save for checkpoint in kept] != [checkpoint.info.save for checkpoint in found]:
                raise ViolationError(f"{found} are to be listed, and {list(kept)} are")
        coming_bytes = sum(checkpoint.size_bytes for checkpoint in known if checkpoint.returns_room)
        if coming_bytes != state.coming_bytes:
            raise ViolationError(f"{coming_bytes} bytes are about to be free, and {state.coming_bytes} are counted")
        committed = [checkpoint for checkpoint in known if checkpoint.durable]
        newest = max(committed, key=lambda one: (one.info.step, one.sequence), default=None)
        if newest is not state.newest_committed:
            raise ViolationError(f"{newest} is the newest that is committed")
        state.touched.update(dict.fromkeys(state.checkpoints))
        # What to give up is weighed with every event, so that may wait for the next.
        overlooked = [command for command in follow_up(state) if not isinstance(command, Record)]
        if overlooked:
            raise ViolationError(f"overlooked: {overlooked}")

    def forget_order(self) -> None:
        """After a restart nobody knows who had the wire."""
        self._went_before.clear()

    def exit(self, state: State, command: Exit, store: StoreModel) -> None:
        newest = max(state.checkpoints.values(), key=lambda checkpoint: checkpoint.sequence, default=None)
        unread = {save: suspect for save, suspect in state.suspects.items() if save in state.unread}
        durable = (newest is None or newest.durable) and not unread
        if (command.code == 0) != durable:
            raise ViolationError(f"exit {command.code} though the newest is {newest.phase if newest else None}")
        if newest is not None and durable and marker_key(newest.info) not in store.objects:
            raise ViolationError(f"exit 0 though {newest.info.save} has no marker")
        for save in self.acked:
            checkpoint = state.checkpoints.get(save)
            if save in unread:
                if not any(line.startswith(unread[save].last.title) for line in command.lost):
                    raise ViolationError(f"{save} is not read and lost is {command.lost}")
                continue
            if checkpoint is None:
                raise ViolationError(f"{save} was forgotten before the exit")
            named = any(line.startswith(f"{checkpoint.info.name} ") for line in command.lost)
            if named == (checkpoint.durable or checkpoint.phase is Phase.SHED):
                raise ViolationError(f"{save} is {checkpoint.phase} and lost is {command.lost}")


def _in_order(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.sequence)


def _newest_to_send(state: State) -> Checkpoint | None:
    return max(
        (
            checkpoint
            for checkpoint in state.checkpoints.values()
            if _can_send(checkpoint) and (checkpoint is newest_possible(state) or worth_sending(state, checkpoint))
        ),
        key=lambda checkpoint: checkpoint.sequence,
        default=None,
    )


def _can_send(checkpoint: Checkpoint) -> bool:
    is_ready = checkpoint.reconciled and checkpoint.set_aside is None and not checkpoint.held_back
    return checkpoint.phase in (Phase.STAGED, Phase.UPLOADING) and is_ready
