"""`advance` applies an event to the state and returns what to journal and what to do. Only here does the state change.

As in etcd's raft, effects are data and are persisted first: the caller makes `Ready.durable` durable, then runs
`Ready.commands` and answers the callers. The same events in the same order give the same state and the same commands.
Replaying the durable events and then `Started` gives a state in which all acknowledged work continues.

`drain.py` decides when to exit.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import assert_never

from keepstep_agent.core.agent import commit_turns, disk_pressure, drain, planner
from keepstep_agent.core.agent.announcements import announced, staged
from keepstep_agent.core.agent.checkpoint import Checkpoint
from keepstep_agent.core.agent.circuit_breaker import CircuitBreaker
from keepstep_agent.core.agent.commands import CancelTermination, Command, LiftBandwidthCap, Record, RequestSave
from keepstep_agent.core.agent.events import (
    DURABLE,
    Abandoned,
    Announced,
    Answered,
    Committed,
    CommitWaits,
    DiskRead,
    DurableEvent,
    Event,
    Exited,
    Failed,
    FileStored,
    ManifestStored,
    NewsDue,
    NewsTaken,
    ObjectiveGiven,
    ObjectsLost,
    OutputLooked,
    PackStored,
    PartStored,
    Pruned,
    RankRegistered,
    RanksSeen,
    Recalled,
    Reconciled,
    Released,
    SaveAborted,
    SaveBegun,
    SaveRequested,
    SentChecked,
    Shed,
    SnapshotNoted,
    Staged,
    Started,
    StepSeen,
    StopRequested,
    Survived,
    TerminationNoticed,
    Ticked,
    UploadCreated,
    WorkCancelled,
    WorkFailed,
)
from keepstep_agent.core.agent.lifecycle import Trigger
from keepstep_agent.core.agent.state import State, Termination, UploadRate, path_pattern
from keepstep_agent.core.agent.work import TRANSFERS, Operation
from keepstep_agent.core.agent.work_results import (
    begin_upload,
    grow_window,
    is_stale,
    judge_store,
    news_of_commit,
    reset_backoff,
    send_again,
    stop_sending,
    store_file,
    store_pack,
    store_part,
    take_up_found,
    work_failed,
)
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.model import Phase
from keepstep_agent.core.policies.commit_news import receivers_of
from keepstep_agent.core.policies.recovery_objective import Objective
from keepstep_agent.core.policies.repeated_deaths import JOURNAL, PRUNE


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Journal the events of `durable`, in order, before anything else; then run `commands`, in order."""

    durable: tuple[DurableEvent, ...]
    commands: tuple[Command, ...]


def advance(state: State, event: Event) -> Ready:
    """Apply one event and every decision that follows from it."""
    durable: list[DurableEvent] = []
    commands: list[Command] = []
    queue: deque[Event] = deque([event])
    while queue:
        current = queue.popleft()
        if isinstance(current, DURABLE):
            durable.append(current)
        found = step(state, current)
        if not queue and not any(isinstance(command, Record) for command in found):
            # Only after the last decision, so that a thousand decisions are followed up once.
            found += planner.follow_up(state)
        for command in found:
            if isinstance(command, Record):
                queue.append(command.event)
            else:
                commands.append(command)
    return Ready(durable=tuple(durable), commands=tuple(commands))


def step(state: State, event: Event) -> list[Command]:
    """Apply one event and nothing that follows from it. Decisions are returned as Record, to be stepped next."""
    was_busy = bool(state.transfers)
    # The times in the journal are of an earlier clock, which may have been ahead.
    state.advance_to(event.at if isinstance(event, Started) else max(state.now, event.at))
    disk_pressure.drop_overdue(state)
    commands = [*expire_termination(state), *_apply(state, event)]
    stored_bytes = event.size_bytes if isinstance(event, PartStored | FileStored | PackStored) else 0
    state.stored_bytes += stored_bytes
    state.upload_rate.note(state.now, was_busy=was_busy, stored_bytes=stored_bytes)
    return commands


def _apply(state: State, event: Event) -> Iterator[Command]:
    match event:
        case Announced():
            announced(state, event)
            if not event.info.is_snapshot:
                begun_at = event.at if event.begun_at is None else event.begun_at
                state.save_requests.begun(event.info.save, begun_at)
                state.save_requests.written(event.info.save)
                # If the client does not say for how long, all of the writing counts.
                state.save_requests.history.stalled(event.stall_seconds or max(0.0, event.at - begun_at))
            checkpoint = state.checkpoints[event.info.save]
            if suspect := state.works_set_aside().get(event.info.save):
                state.set_aside_for(checkpoint, suspect)
            state.reindex(checkpoint)
        case Shed() | Failed():
            _given_up(state, event)
            state.reindex(state.checkpoints[event.save])
        case NewsDue():
            # An earlier life of this agent may have had other receivers.
            receivers = [one for one in event.receivers if one in receivers_of(state.settings.events)]
            state.untold_news.note(event.news, receivers)
        case NewsTaken():
            state.untold_news.taken(event.save, event.receiver)
        case Started():
            yield from _started(state, event)
            for checkpoint in state.checkpoints.values():
                state.reindex(checkpoint)
        case TerminationNoticed():
            yield from termination_noticed(state, event)
        case RankRegistered():
            state.ranks[event.local_rank] = event.rank
        case Exited():
            state.termination = Termination(first_sequence=state.next_sequence, begun_at=event.at)
            state.ranks.clear()
        case StopRequested():
            if state.termination.stop_requested_at is None:
                state.termination.stop_requested_at = state.now
                if not state.termination.noticed:
                    # What waits half a minute for its next try would not be tried again before the exit.
                    reset_backoff(state, of_failures_only=True)
            state.termination.trainers_gone |= event.trainers_gone
            state.termination.nothing_found = state.termination.nothing_found or event.nothing_found
        case RanksSeen():
            if state.alive_ranks - event.alive:
                # A rank that died in the middle of a save will neither announce nor abort it.
                state.begun.clear()
                state.save_requests.writing = ""
            if event.alive - state.alive_ranks:
                state.save_requests.trainers_started(state.now)
            if not event.alive:
                # The next program may set none.
                state.save_requests.program_objective = None
            _note_ends(state.termination, event, new_trainers=bool(event.alive - state.alive_ranks))
            state.alive_ranks = event.alive
            state.termination.most_alive = max(state.termination.most_alive, len(event.alive))
        case StepSeen():
            if event.newest is not None:
                if event.newest.step < state.last_step:
                    # Another training, or the same one from an earlier checkpoint on.
                    state.training_sequence = state.next_sequence
                state.last_step = event.newest.step
            state.progress.note(event.newest)
            state.progress.stuck = state.are_trainers_stuck(state.now)
        case DiskRead():
            state.disk, state.freed_bytes = event, 0
        case SaveBegun():
            disk_pressure.reserve(state, event)
            state.save_requests.begun(event.save, event.at)
        case SaveAborted():
            state.begun.pop(event.save, None)
            state.save_requests.written(event.save)
            if event.save in state.save_requests.begun_at:
                state.save_requests.history.stalled(max(0.0, event.at - state.save_requests.begun_at[event.save]))
        case SaveRequested():
            yield RequestSave(terminating=False, deadline=0.0)
        case ObjectiveGiven():
            state.save_requests.program_objective = Objective(
                recovery_point_seconds=event.recovery_point_seconds, max_overhead=event.max_overhead
            )
        case OutputLooked():
            state.not_stored = event.not_stored
        case SnapshotNoted():
            snapshot = state.checkpoints.get(event.save)
            if snapshot is not None:
                snapshot.mirror_noted = True
                if snapshot.phase is Phase.RELEASED:
                    snapshot.forget_files()
        case Survived():
            state.acquit(event.suspect)
        case Recalled():
            state.land(event.work)
            yield from _recalled(state, event)
        case Ticked():
            pass
        case _:
            state.land(event.work)
            judge_store(state, event.work, event)
            found = state.checkpoints.get(event.work.save)
            if isinstance(event, WorkFailed) and event.work.operation is Operation.RECALL:
                _try_later(state, event.work.save)
            if isinstance(event, Pruned):
                state.acquit(PRUNE)
            if found is not None:
                if not isinstance(event, Pruned | Answered) and event.work.operation is not Operation.ASK:
                    yield from _work_ended(state, found, event)
                state.reindex(found)


def _work_ended(
    state: State,
    checkpoint: Checkpoint,
    event: Staged
    | UploadCreated
    | PartStored
    | FileStored
    | PackStored
    | SentChecked
    | ManifestStored
    | Reconciled
    | ObjectsLost
    | CommitWaits
    | Committed
    | Released
    | Abandoned
    | WorkFailed
    | WorkCancelled,
) -> Iterator[Command]:
    if isinstance(event, WorkFailed):
        yield from work_failed(state, checkpoint, event)
        return
    if isinstance(event, Abandoned):
        checkpoint.uploads_aborted = checkpoint.ended
        return
    if isinstance(event, Released):
        if not checkpoint.ended:
            # The save had failed and was announced again meanwhile: it will be pinned anew.
            return
        checkpoint.pins_dropped = True
        state.acquit(checkpoint.info.save)
        state.freed_bytes += checkpoint.size_bytes
        if checkpoint.phase is Phase.COMMITTED:
            checkpoint.move(Trigger.PINS_DROPPED)
            if checkpoint.mirror_noted or not checkpoint.info.is_snapshot:
                checkpoint.forget_files()
        return
    if checkpoint.ended:
        if isinstance(event, UploadCreated):
            begin_upload(checkpoint, event.work, event.upload)
        return
    if event.work.rank >= 0 and event.work.rank not in checkpoint.contributions:
        # The answer concerns a save that failed and was announced again meanwhile.
        return
    if event.work.operation is not Operation.CREATE_UPLOAD:
        # Attempts to create an upload keep counting: a store that forgets uploads must not be asked in a hot loop.
        checkpoint.attempts.pop(event.work, None)
        checkpoint.failed_alone.pop(event.work, None)
    aside = checkpoint.set_aside
    if aside is not None and not isinstance(event, WorkCancelled) and aside.work.is_same_work(event.work):
        state.put_aside(checkpoint, None)
    match event:
        case Staged():
            yield from staged(state, checkpoint, event)
        case UploadCreated():
            begin_upload(checkpoint, event.work, event.upload)
        case PartStored():
            store_part(checkpoint, event)
            grow_window(state)
        case FileStored():
            store_file(checkpoint, event.work.rank, event.work.path, event.checksum)
            grow_window(state)
        case PackStored():
            store_pack(checkpoint, event.work.rank, event.work.number, event.checksums)
            grow_window(state)
        case SentChecked():
            contribution = checkpoint.contributions[event.work.rank]
            contribution.checked = contribution.staged and not contribution.files.unstored_count
        case ManifestStored():
            # Another rank may have announced since it was begun.
            if event.work.number == len(checkpoint.contributions):
                checkpoint.manifest_stored = True
                checkpoint.move(Trigger.ALL_SEALED)
                commit_turns.begin(state, checkpoint)
        case Reconciled():
            take_up_found(checkpoint, event)
        case ObjectsLost():
            send_again(checkpoint, event)
            # A store that takes everything and keeps nothing never fails.
            state.standstill.failed(ErrorKind.STORE_FAILED, state.now)
        case CommitWaits():
            commit_turns.wait(state, checkpoint, event)
        case Committed():
            state.acquit(checkpoint.info.save)
            checkpoint.move(Trigger.MARKER_READ_BACK)
            checkpoint.committed_at = event.at
            _measure(state, checkpoint)
            state.outcomes[Phase.COMMITTED] = state.outcomes.get(Phase.COMMITTED, 0) + 1
            checkpoint.durable_bytes = checkpoint.size_bytes
            state.storage_error = ""
            # Failed checkpoints may have kept their pins until a newer one is committed.
            state.touched.update((older.info.save, None) for older in state.tidying.values())
            state.prune_due = state.settings.retention.keep_last > 0 and 0 in checkpoint.contributions
            stop_sending(checkpoint)
            yield from news_of_commit(state, checkpoint)
        case WorkCancelled():
            if event.work.operation in TRANSFERS and not is_stale(checkpoint, event.work):
                checkpoint.pending.appendleft(event.work)
        case _:
            assert_never(event)


def _measure(state: State, checkpoint: Checkpoint) -> None:
    """Note what a checkpoint took that is committed now, and how old the one became that it replaces."""
    history = state.save_requests.history
    before = state.newest_snapshot if checkpoint.info.is_snapshot else state.newest_committed
    if before is not None:
        history.replaced(max(0.0, checkpoint.committed_at - before.taken_at))
    commit_seconds = max(0.0, checkpoint.committed_at - checkpoint.announced_at)
    wanted = state.save_requests.objective(state.settings.objective)
    # An outage does not say how long commits take.
    in_outage = state.storage_error and wanted is not None and commit_seconds > wanted.recovery_point_seconds
    if not checkpoint.info.is_snapshot and not in_outage:
        history.committed(write_seconds=checkpoint.announced_at - checkpoint.taken_at, commit_seconds=commit_seconds)


def _given_up(state: State, event: Shed | Failed) -> None:
    checkpoint = state.checkpoints[event.save]
    # Two decisions of one step can concern the same checkpoint; the first one stands.
    if checkpoint.ended:
        return
    checkpoint.reason = event.reason
    if isinstance(event, Shed):
        checkpoint.move(Trigger.GIVEN_UP)
    else:
        checkpoint.move(Trigger.BROKEN)
        checkpoint.error_kind, checkpoint.hint = event.kind, event.hint
        if event.kind is ErrorKind.FILE_CHANGED:
            # The trainer will rewrite the files of the next checkpoint in place too.
            staged = (contribution for contribution in checkpoint.contributions.values() if contribution.staged)
            state.rewritten_paths.update(path_pattern(contribution.announced.path) for contribution in staged)
    state.acquit(event.save)
    state.outcomes[checkpoint.phase] = state.outcomes.get(checkpoint.phase, 0) + 1
    stop_sending(checkpoint)


def _note_ends(termination: Termination, event: RanksSeen, *, new_trainers: bool) -> None:
    """Note how ranks have ended. Without a notice here, one may have left for that of another node."""
    if new_trainers and not termination.noticed:
        termination.left, termination.lost_at = False, None
    termination.left |= event.left
    if event.lost_at is not None:
        termination.lost_at = max(termination.lost_at or 0, event.lost_at)
    # Of one that died before a notice, nobody wanted a save.
    died = [sign for sign in (termination.cut_short, event.cut_short) if sign is not None and termination.noticed]
    termination.cut_short = max(died, key=lambda sign: sign.step, default=None)


def _started(state: State, event: Started) -> Iterator[Command]:
    state.live = True
    state.outcomes.clear()
    state.stored_bytes = 0
    state.timers.clear()
    state.forget_work()
    state.window = float(state.settings.transfer.max_concurrency)
    state.breaker = CircuitBreaker()
    # Replayed events do not tell how long their bytes took.
    state.upload_rate = UploadRate()
    state.begun.clear()
    deadline = state.termination.deadline
    if event.fresh:
        state.termination = Termination(first_sequence=state.next_sequence, begun_at=event.at)
    elif deadline is not None and deadline <= event.at:
        state.termination = Termination(first_sequence=state.next_sequence, begun_at=state.termination.begun_at)
    state.active_upload, state.active_upload_preempted = "", False
    # The agent has read its journal and lives.
    state.suspects = {work: suspect for work, suspect in event.suspects.items() if work != JOURNAL}
    unread = [work for work, one in state.suspects.items() if one.is_unread and work not in state.checkpoints]
    state.unread = {save: sequence for save, sequence in state.unread.items() if save in unread}
    for save in unread:
        state.leave_unread(save)
    for save in [save for save in state.suspects if _is_over(state, save)]:
        del state.suspects[save]
    for checkpoint in state.checkpoints.values():
        suspect = state.suspects.get(checkpoint.info.save)
        if suspect is not None and suspect.is_set_aside and checkpoint.phase is not Phase.FAILED:
            state.set_aside_for(checkpoint, suspect)
        _go_on_after_start(checkpoint)
    if state.termination.noticed:
        # The trainers that were told of the notice may have died together with the agent.
        yield LiftBandwidthCap()
        yield RequestSave(terminating=True, deadline=drain.deadline(state) or 0.0)


def _is_over(state: State, work: str) -> bool:
    """Whether a suspect is a save that the agent no longer has."""
    return not (work.startswith(":") or work in state.checkpoints or work in state.unread)


def _go_on_after_start(checkpoint: Checkpoint) -> None:
    """Begin the work of a checkpoint anew that an earlier agent may have begun."""
    checkpoint.may_have_orphans = not checkpoint.durable
    if not checkpoint.ended:
        stop_sending(checkpoint)
        checkpoint.reconciled = not checkpoint.any_staged


def _recalled(state: State, event: Recalled) -> Iterator[Command]:
    """Take in a save that was left unread at the start, as if it had been read then."""
    save = event.work.save
    sequence = state.unread.pop(save, None)
    if sequence is None:
        return
    # What is over and done must not happen to the others now: it neither shows that the store is there, nor fails them.
    read = State(settings=state.settings, next_sequence=sequence)
    for recorded in event.events:
        if isinstance(recorded, NewsDue | NewsTaken):
            yield from _apply(state, recorded)
        else:
            step(read, recorded)
    state.rewritten_paths |= read.rewritten_paths
    # Of one that was announced again meanwhile, with nothing but its announcements.
    again = state.checkpoints.get(save)
    checkpoint = read.checkpoints.get(save, again)
    if checkpoint is None:
        # There is nothing of it.
        state.acquit(save)
        return
    for rank, contribution in again.contributions.items() if again and not checkpoint.ended else ():
        checkpoint.contributions.setdefault(rank, contribution)
    if (suspect := state.suspects.get(save)) and not checkpoint.ended:
        state.set_aside_for(checkpoint, suspect)
    _go_on_after_start(checkpoint)
    state.take_in(checkpoint)


def _try_later(state: State, save: str) -> None:
    """The records of a save could not be read: count that as one more death."""
    suspect = state.suspects.get(save)
    if suspect is not None:
        state.suspects[save] = replace(suspect, deaths=suspect.deaths + 1, noted_at=state.now)


def expire_termination(state: State) -> Iterator[Command]:
    """End the termination once its notice has expired; the pod goes on as before it."""
    lapses_at = drain.expires_at(state)
    if lapses_at is not None and lapses_at <= state.now:
        state.termination = Termination(first_sequence=state.next_sequence, begun_at=state.now)
        if state.live:
            yield CancelTermination()


def termination_noticed(state: State, event: TerminationNoticed) -> Iterator[Command]:
    termination = state.termination
    first = not termination.noticed
    earlier = event.deadline is not None and (termination.deadline is None or event.deadline < termination.deadline)
    if earlier:
        termination.deadline = event.deadline
    if first:
        termination.noticed, termination.source = True, event.source
        termination.noticed_sequence = state.next_sequence
        termination.most_alive = len(state.alive_ranks)
        reset_backoff(state)
        if state.settings.transfer.bandwidth_bytes_per_second:
            # The measured rate is that of the cap. By it, checkpoints that fit before the deadline would not seem to.
            state.upload_rate.forget()
        yield LiftBandwidthCap()
    if first or earlier:
        yield RequestSave(terminating=True, deadline=drain.deadline(state) or 0.0)
