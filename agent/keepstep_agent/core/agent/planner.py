"""Derives from the state what to do next.

It looks at the state and never at the last event, so a lost or repeated event does no harm. It visits only checkpoints
that have changed or whose timer is due: nothing can be due in the others. `follow_up` is called after every event. Each
piece of work that it requests is marked as in flight at once, so that nothing is requested twice.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Final

from keepstep_agent.core.agent import commit_turns, disk_pressure, drain, upload_queue
from keepstep_agent.core.agent.checkpoint import Checkpoint, RankContribution
from keepstep_agent.core.agent.commands import (
    Abandon,
    CancelWork,
    CheckSent,
    Command,
    Commit,
    KnownFile,
    Prune,
    Recall,
    Reconcile,
    Record,
    Release,
    RequestSave,
    Stage,
    WriteManifest,
)
from keepstep_agent.core.agent.events import Shed
from keepstep_agent.core.agent.lifecycle import LOST_PHASES
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.agent.work import CANCELLABLE, TRANSFERS, Operation, WorkId, work_limit_of
from keepstep_agent.core.model import Phase
from keepstep_agent.core.policies.repeated_deaths import PRUNE, Suspect, is_announcement
from keepstep_agent.core.stored.object_layout import file_key
from keepstep_agent.core.stored.packs_and_parts import PACK_BYTES, preferred_part_size

_ENDED_KEPT: Final = 8
"""Ended checkpoints that stay known for status and for idempotent announcements."""


_STUBBORN_ATTEMPTS: Final = 5
"""Work that has failed so often does not hold up what is tried last: it may fail for ever."""

_INCOMPLETE_KEPT_SECONDS: Final = 600.0
"""How long a superseded checkpoint may wait, for ranks or set aside, once a newer one is committed."""


def follow_up(state: State) -> Iterator[Command]:
    """Yield every command that is due."""
    if not state.live or state.termination.exiting:
        return
    decisions = list(_decisions(state))
    if decisions:
        yield from decisions
        return
    yield from _work(state)
    if state.breaker.next_round(state.now):
        yield from _work(state)
    if state.suspects:
        yield from _hold_back(state)
        yield from _work(state)
    work = WorkId(Operation.PRUNE, "")
    may_prune = not state.termination.noticed and not state.breaker.is_open and may_begin(state, PRUNE)
    if state.prune_due and work not in state.in_flight and may_prune:
        state.prune_due = False
        state.launch(work)
        yield Prune(work=work)
    save_due_at = _save_due_at(state)
    if save_due_at is not None and save_due_at <= state.now:
        state.save_requests.requested_at = state.now
        yield RequestSave(terminating=False, deadline=0.0)
    _forget(state)
    verdict = drain.exit_verdict(state)
    if verdict:
        state.termination.exiting = True
        yield verdict


def _work(state: State) -> Iterator[Command]:
    touched, state.touched = state.touched, {}
    waiting = (save for sort in state.work_limits for save in sort.next_saves())
    for save in chain(touched, waiting):
        checkpoint = state.checkpoints.get(save)
        if checkpoint is not None and not checkpoint.held_back:
            yield from _checkpoint_work(state, checkpoint)
    yield from upload_queue.next_transfers(state)
    yield from upload_queue.make_room(state)


def _hold_back(state: State) -> Iterator[Command]:
    """Let the work that is set aside wait until nothing else is left to do; then begin one save's after the other."""
    tried = _tried_now(state)
    for save in state.works_set_aside():
        checkpoint = state.checkpoints.get(save)
        waits = save not in tried or save in state.unread
        # The pins of one that failed are kept until a newer one is committed, so there is nothing to wait with.
        if checkpoint is None or checkpoint.held_back == waits or checkpoint.phase is Phase.FAILED:
            continue
        checkpoint.held_back = waits
        state.reindex(checkpoint)
        for work in sorted(state.in_flight_of(save)) if waits else ():
            if work.operation in CANCELLABLE and work not in state.cancelling:
                state.cancelling.add(work)
                yield CancelWork(work=work)
    for save in tried:
        work = WorkId(Operation.RECALL, save)
        if save in state.unread and work not in state.in_flight:
            state.launch(work)
            yield Recall(work=work)


def _tried_now(state: State) -> Sequence[str]:
    """Return the saves that are set aside and may be worked on now: none if anything else is left to do.

    That is one, until it is done or fails again and again; then the next, of those that killed the fewest agents. If
    all of them wait for other agents, it is all of them.
    """
    set_aside = state.works_set_aside()
    due = [save for save, suspect in set_aside.items() if _may_be_tried_now(state, save, suspect)]
    if not due or _has_other_work(state, set_aside):
        return ()

    def order(save: str) -> tuple[bool, int, bool, int, int]:
        checkpoint = state.checkpoints.get(save)
        # Memory grows with the files. How many an unread one has, nobody knows.
        size = (checkpoint.file_count, -checkpoint.sequence) if checkpoint else (0, 0)
        is_unread = save in state.unread
        is_begun = bool(state.in_flight_of(save)) if is_unread or checkpoint is None else not checkpoint.held_back
        return not is_begun, set_aside[save].deaths, is_unread, *size

    ready = [save for save in due if save in state.unread or _goes_on(state.checkpoints[save])]
    return [min(ready, key=order)] if ready else due


def _may_be_tried_now(state: State, work: str, suspect: Suspect) -> bool:
    checkpoint = state.checkpoints.get(work)
    has_work = (
        work in state.unread if checkpoint is None else not checkpoint.settled and checkpoint.phase is not Phase.FAILED
    )
    return has_work and suspect.due_at <= state.now and drain.may_be_tried(state, work)


def _has_other_work(state: State, set_aside: Collection[str]) -> bool:
    """Whether anything that is not set aside is under way, or goes on by itself."""
    return any(work.save not in set_aside for work in state.in_flight) or any(
        _goes_on(checkpoint) for save, checkpoint in state.unfinished.items() if save not in set_aside
    )


def _goes_on(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint waits for nobody else, and fails at nothing again and again."""
    waits = not checkpoint.all_announced or (checkpoint.phase is Phase.SEALED and checkpoint.waits_for_others)
    return not waits and max(checkpoint.attempts.values(), default=0) < _STUBBORN_ATTEMPTS


def may_begin(state: State, work: str) -> bool:
    """Whether work of the agent's that belongs to no save may begin: if set aside, only when nothing else is to do."""
    suspect = state.suspects.get(work)
    if suspect is None or not suspect.is_set_aside:
        return True
    is_due = suspect.due_at <= state.now and drain.may_be_tried(state, work)
    tried = (state.checkpoints.get(save) for save in _tried_now(state))
    is_last = all(one is not None and not _goes_on(one) for one in tried)
    return is_due and is_last and not _has_other_work(state, state.works_set_aside())


def may_take_announcement(state: State) -> bool:
    """Whether an announcement that was set aside may be looked at again."""
    return any(is_announcement(work) and may_begin(state, work) for work in state.works_set_aside())


def _decisions(state: State) -> Iterator[Record]:
    """Yield which checkpoints to give up. All other work waits until these decisions are applied."""
    superseded = disk_pressure.to_shed(state)
    for checkpoint in superseded:
        yield _shed(state, checkpoint, "superseded, and the volume is nearly full")
    given_up = {checkpoint.info.save for checkpoint in superseded}
    never_completed = ((checkpoint, "some of its ranks were never completed") for checkpoint in _abandoned(state))
    set_aside = ((checkpoint, checkpoint.problem) for checkpoint in _set_aside_for_long(state))
    for checkpoint, why in chain(never_completed, set_aside):
        if checkpoint.info.save not in given_up:
            given_up.add(checkpoint.info.save)
            yield _shed(state, checkpoint, f"superseded, and {why}")


def _shed(state: State, checkpoint: Checkpoint, reason: str) -> Record:
    return Record(event=Shed(at=state.now, save=checkpoint.info.save, reason=reason))


def next_wake(state: State) -> float | None:
    """Return the next moment (unix seconds) at which something may become due by time alone; None if there is none."""
    moments = [state.timers[0][0]] if state.timers else []
    if state.breaker.is_open and state.breaker.next_at > state.now:
        moments.append(state.breaker.next_at)
    others = (drain.next_wake(state), drain.expires_at(state), _save_due_at(state))
    moments += [moment for moment in others if moment is not None]
    moments += [suspect.due_at for suspect in state.suspects.values() if suspect.due_at > state.now]
    return min(moments, default=None)


def _save_due_at(state: State) -> float | None:
    """Return when the recovery point objective asks for a save; None if it does not, or somebody else asks."""
    wanted = state.save_requests.objective(state.settings.objective)
    if wanted is None or state.termination.noticed or not _has_rank_0(state):
        return None
    newest = next(
        (
            checkpoint
            for checkpoint in reversed(state.checkpoints.values())
            if not checkpoint.info.is_snapshot and checkpoint.phase not in LOST_PHASES
        ),
        None,
    )
    return state.save_requests.due_at(
        wanted,
        newest_taken_at=newest.taken_at if newest else 0.0,
        # Without the store, a save to the volume is still worth its time.
        is_on_its_way=newest is not None and not newest.ended and not newest.held_back and not state.storage_error,
    )


def _has_rank_0(state: State) -> bool:
    """Whether rank 0 of the job is alive here. In the first pod an unregistered local rank 0 is taken for it."""
    unregistered = 0 if state.settings.node_rank == 0 else -1
    return any(state.ranks.get(local_rank, local_rank or unregistered) == 0 for local_rank in state.alive_ranks)


def _checkpoint_work(state: State, checkpoint: Checkpoint) -> Iterator[Command]:
    save = checkpoint.info.save
    if checkpoint.ended:
        yield from _release(state, checkpoint)
        yield from _abandon(state, checkpoint)
        return
    upload_queue.requeue(state, checkpoint)
    # The release of a failed try's pins must not overlap with the next stage.
    releasing = WorkId(Operation.RELEASE, save) in state.in_flight
    for contribution in () if releasing else _ready_to_stage(checkpoint):
        work = WorkId(Operation.STAGE, save, contribution.rank)
        if _take(state, checkpoint, work):
            yield Stage(
                work=work,
                announcements=tuple(one.announced for one in _staged_with(checkpoint, contribution)),
                private=state.rewrites(contribution.announced.path),
                rewritten_inodes=_inodes_pinned_there_before(state, checkpoint, contribution.announced.path),
                part_size_bytes=preferred_part_size(
                    state.settings.transfer.part_size_bytes,
                    state.upload_rate.bytes_per_second,
                    int(state.window),
                    is_certain=state.upload_rate.is_certain,
                    expected_bytes=disk_pressure.forecast_bytes(state),
                ),
                pack_size_bytes=PACK_BYTES,
            )
    if not checkpoint.reconciled:
        work = WorkId(Operation.RECONCILE, save)
        if _take(state, checkpoint, work):
            yield _reconcile(checkpoint, work)
        return
    if not checkpoint.manifest_stored:
        yield from _seal(state, checkpoint)
    if checkpoint.phase is Phase.SEALED:
        work = WorkId(Operation.COMMIT, save)
        if _take(state, checkpoint, work):
            yield Commit(
                work=work,
                info=checkpoint.info,
                ranks=checkpoint.manifests(),
                turn=commit_turns.turn(state, checkpoint),
                sweep_uploads=checkpoint.may_have_orphans,
            )


def _take(state: State, checkpoint: Checkpoint, work: WorkId) -> bool:
    """Put `work` in flight and return True, unless it is in flight or waits for a retry, the store or a work limit."""
    if work in state.in_flight or checkpoint.delayed.get(work, 0.0) > state.now:
        return False
    if not state.breaker.lets_out(work, state.now):
        state.touched[work.save] = None
        return False
    sort = work_limit_of(state.work_limits, work)
    if sort is not None and sort.busy >= sort.limit and checkpoint is not state.newest():
        sort.wait(work.save)
        return False
    checkpoint.delayed.pop(work, None)
    state.launch(work)
    return True


def _ready_to_stage(checkpoint: Checkpoint) -> Iterator[RankContribution]:
    """Yield the contributions to pin now. A directory that ranks share is pinned once, when the last has announced."""
    for contribution in checkpoint.contributions.values():
        if contribution.staged:
            continue
        if not contribution.shares_directory:
            yield contribution
            continue
        if (
            len(checkpoint.contributions) >= contribution.announced.local_world_size
            and contribution is _staged_with(checkpoint, contribution)[0]
        ):
            yield contribution


def _staged_with(checkpoint: Checkpoint, contribution: RankContribution) -> list[RankContribution]:
    """Return the contributions that are pinned together, as one piece of work of the first: a shared directory's."""
    if not contribution.shares_directory:
        return [contribution]
    sharing = (one for one in checkpoint.contributions.values() if one.announced.path == contribution.announced.path)
    return sorted(sharing, key=lambda one: one.rank)


def _inodes_pinned_there_before(state: State, checkpoint: Checkpoint, path: str) -> frozenset[int]:
    """Return the linked inodes of the last checkpoint from exactly this path.

    A file of this checkpoint that has one of them was rewritten in place.
    """
    other = state.staged_from(path, before=checkpoint)
    contributions = other.contributions.values() if other else ()
    return frozenset().union(*(one.linked_inodes() for one in contributions if one.announced.path == path))


def _seal(state: State, checkpoint: Checkpoint) -> Iterator[Command]:
    """Check each rank when it is sent, and write the manifest when all are checked."""
    save, unchecked = checkpoint.info.save, False
    for contribution in checkpoint.contributions.values():
        if contribution.checked:
            continue
        unchecked = True
        if contribution.staged and not contribution.files.unstored_count:
            work = WorkId(Operation.CHECK_SENT, save, contribution.rank)
            if _take(state, checkpoint, work):
                manifest = checkpoint.manifest(contribution.rank)
                yield CheckSent(work=work, manifest=manifest, pins=contribution.files.pinned)
    if not unchecked and checkpoint.all_announced:
        work = WorkId(Operation.WRITE_MANIFEST, save, number=len(checkpoint.contributions))
        if _take(state, checkpoint, work):
            yield WriteManifest(work=work, ranks=checkpoint.manifests())


def _reconcile(checkpoint: Checkpoint, work: WorkId) -> Reconcile:
    staged = [contribution for contribution in checkpoint.contributions.values() if contribution.staged]
    return Reconcile(
        work=work,
        info=checkpoint.info,
        announced_at=tuple((contribution.rank, contribution.announcement_time) for contribution in staged),
        staged=tuple((contribution.rank, contribution.files.pinned) for contribution in staged),
        unfinished=tuple(
            KnownFile(
                rank=contribution.rank,
                file=progress.file,
                upload=progress.upload,
                part_size_bytes=progress.part_size_bytes,
                parts=tuple(
                    (number, receipt, progress.multipart.checksums[number])
                    for number, receipt in sorted(progress.multipart.receipts.items())
                )
                if progress.multipart
                else (),
            )
            for contribution in staged
            for progress in contribution.files.sent_alone()
            if not progress.stored
        ),
    )


def _release(state: State, checkpoint: Checkpoint) -> Iterator[Command]:
    """Drop pins: of a committed or shed checkpoint at once, of a failed one when a newer one is durable."""
    save = checkpoint.info.save
    if checkpoint.pins_dropped:
        return
    works = state.in_flight_of(save)
    for work in sorted(works):
        if work.operation in CANCELLABLE and work not in state.cancelling:
            state.cancelling.add(work)
            yield CancelWork(work=work)
    if checkpoint.phase is Phase.FAILED and checkpoint.any_staged:
        newest = state.superseded_by(checkpoint)
        if newest is None or newest.sequence < checkpoint.sequence:
            return
    work = WorkId(Operation.RELEASE, save)
    if not works and _take(state, checkpoint, work):
        yield Release(work=work, is_committed=checkpoint.durable)


def _abandon(state: State, checkpoint: Checkpoint) -> Iterator[Command]:
    """Abort the multipart uploads of a given-up checkpoint. Its pins are released separately, without the store."""
    if checkpoint.durable or checkpoint.uploads_aborted:
        return
    if any(work.operation in TRANSFERS for work in state.in_flight_of(checkpoint.info.save)):
        return
    files = [one for contribution in checkpoint.contributions.values() for one in contribution.files.sent_in_parts()]
    uploads = [progress for progress in files if progress.upload and not progress.stored]
    swept = files if checkpoint.may_have_orphans else []
    if not uploads and not swept:
        checkpoint.uploads_aborted = True
        state.reindex(checkpoint)
        return
    work = WorkId(Operation.ABANDON, checkpoint.info.save)
    if _take(state, checkpoint, work):
        yield Abandon(
            work=work,
            info=checkpoint.info,
            uploads=tuple((file_key(checkpoint.info, progress.file.path), progress.upload) for progress in uploads),
            sweep_keys=tuple(file_key(checkpoint.info, progress.file.path) for progress in swept),
        )


def _abandoned(state: State) -> Iterator[Checkpoint]:
    """Yield checkpoints that still wait for ranks although a newer one was committed there ten minutes ago.

    A rank, here or elsewhere, died or gave the checkpoint up. If another agent seals it after all, that agent writes
    the marker: the manifest that this agent has written stays in the bucket.
    """
    newest = {
        key: one.sequence
        for key, one in state.last_committed.items()
        if state.now - one.committed_at >= _INCOMPLETE_KEPT_SECONDS
    }
    last = max(newest.values(), default=-1)
    for checkpoint in state.unfinished.values():
        if checkpoint.sequence > last:
            return
        elsewhere = checkpoint.phase is Phase.SEALED and checkpoint.waits_for_others
        is_superseded = checkpoint.sequence < newest.get(checkpoint.info.output_key, -1)
        if is_superseded and (elsewhere or not checkpoint.all_announced):
            yield checkpoint


def _set_aside_for_long(state: State) -> Iterator[Checkpoint]:
    """Yield checkpoints that are set aside although a newer one was committed there ten minutes ago."""
    for checkpoint in state.set_aside.values():
        newest = state.superseded_by(checkpoint)
        if newest is None or newest.sequence < checkpoint.sequence:
            continue
        if state.now - newest.committed_at >= _INCOMPLETE_KEPT_SECONDS:
            yield checkpoint


def _forget(state: State) -> None:
    """Forget settled checkpoints except the newest committed one, the newest snapshot and the last eight."""
    over = [checkpoint for checkpoint in state.settled.values() if not state.is_newest(checkpoint)]
    if len(over) > _ENDED_KEPT:
        for checkpoint in sorted(over, key=lambda checkpoint: checkpoint.sequence)[:-_ENDED_KEPT]:
            state.forget(checkpoint)
