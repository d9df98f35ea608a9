"""The entry point for a training loop: resume, ask whether to save, save, stop in time.

Owns which step is saved and what is still being written. Past the constructor it raises only what the user's own code
raised while saving, UsageError for arguments that make no sense, VolumeError when the pods have no checkpoint in common
or the last save of all is lost, and RanksError or RestoreError when nobody can tell what to resume from. The ranks of a
pod share its directory.
"""

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Final

from keepstep.asynchronous_saves.background_writer import BackgroundWriter
from keepstep.asynchronous_saves.save_functions import handing_in
from keepstep.checkpoint_writer import CheckpointWriter, SaveBlock, checked_units
from keepstep.checkpoints.local_checkpoints import directory_in
from keepstep.checkpoints.rank_files import file_of_a_rank
from keepstep.checkpoints.records import Kind, Record
from keepstep.checkpoints.trainings import is_taken
from keepstep.errors import ErrorKind, UsageError, VolumeError, final_checkpoint_lost
from keepstep.gate import Action
from keepstep.integrations.ownership import Owner, claim
from keepstep.ranks.coordinator import WRITE_SECONDS
from keepstep.resuming import PartialCheckpoint, Resumption
from keepstep.save_schedule import Interval, SaveSchedule, parse_interval, parse_objective
from keepstep.session import PendingSave, Session
from keepstep.settings import Settings, read_settings

_log: Final = logging.getLogger("keepstep")
_EVERY_STEPS: Final = 100


class Checkpointer:
    """Saves a training loop's checkpoints in one directory and announces each to the agent.

    Every rank makes one and calls the same methods at the same steps. Without an agent it saves locally in the same
    way. It handles SIGTERM until `finish`.

    Args:
        directory: Where checkpoints are written. By default `keepstep run` and the injection choose it, else it is
            `./checkpoints`.
        name: Tells the programs of one run apart, such as `"pretraining"`: each saves in a folder of its own, and
            resumes from there. Not with a `directory`.
        volume: The directory that trainer and agent share; `directory` lies in it. From the environment by default.
        socket: The agent's unix socket. From the environment by default.
        keep_local: How many complete checkpoints stay on the local disk.
        rank0_only: This process saves for all ranks; the other ranks make no Checkpointer.
        asynchronous: False: training waits until a periodic save is written, and not only for a copy of what
            `torch.save`, safetensors' `save_file` and `TorchLoop` get. The copy takes memory for one more state. By
            default the environment decides, else it is true.

    Raises:
        UsageError: An argument makes no sense.
        VolumeError: The directory cannot be written.

    Example:
        ```python
        checkpointer = keepstep.Checkpointer()
        if (path := checkpointer.resume()) is not None:
            step = load(path / "state.pt")
        while step < 10_000 and not checkpointer.stopping:
            train_one_step()
            step += 1
            if checkpointer.should_save(step, every="10m"):
                with checkpointer.save(step) as directory:
                    torch.save(state(), directory / "state.pt")
        checkpointer.finish()
        ```
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        name: str | None = None,
        volume: str | Path | None = None,
        socket: str | Path | None = None,
        keep_local: int = 1,
        rank0_only: bool = False,
        asynchronous: bool | None = None,
    ) -> None:
        if keep_local < 1:
            raise UsageError(ErrorKind.BAD_ARGUMENT, f"keep_local is {keep_local}", hint="keep at least one checkpoint")
        settings = read_settings(os.environ, directory=directory, name=name, volume=volume, socket=socket)
        self._keep_local = keep_local
        self._pending: PendingSave | None = None
        self._schedule = SaveSchedule(time.monotonic())
        self._resumed = False
        self._trains = False
        self._session = Session(settings, rank0_only=rank0_only)
        self._asynchronous = settings.asynchronous is not False if asynchronous is None else asynchronous
        self._writer = BackgroundWriter()
        if self._asynchronous and settings.ranks.rank == 0:
            # Which other ranks write as much is not known.
            self._writer.expect()
        claim(Owner.CHECKPOINTER)

    @property
    def stopping(self) -> bool:
        """Whether the pod is ending and the just-in-time save is made: leave the loop."""
        return self._session.stopping

    def resume(self) -> Path | None:
        """Choose the newest complete checkpoint, the same on all ranks.

        Returns:
            Its directory, to load from; None to start from step 0.

        Raises:
            UsageError: Another program of this run has ended its training in this directory.
            VolumeError: The pods of the job have checkpoints, but none in common.
            RanksError: Some ranks did not come.
            RestoreError: There may be a checkpoint at the destination, and it cannot be had.
            SystemExit: With code 143, when the pod is already ending and no step was done.
        """
        newest = self._resumption().choose()
        if newest is None:
            return None
        self._warn_of_other_ranks(newest)
        return self._resume_from(newest)

    def resume_partially(self, first: str) -> PartialCheckpoint | Path | None:
        """Choose as `resume`, for a reader that knows which bytes it needs. Errors as `resume`.

        Args:
            first: Path of the file, relative to the checkpoint, that says where everything else is. Rank 0 reads it.

        Returns:
            With lazy restore a checkpoint whose `fetch` brings what is read. Only `first` is on a volume, that of rank
            0. Otherwise its directory, as `resume` does.
        """
        newest = self._resumption().choose_partial([(first, 0, 0)])
        if isinstance(newest, PartialCheckpoint):
            self._begins_at(newest.step)
            return newest
        return None if newest is None else self._resume_from(newest)

    def _resumption(self) -> Resumption:
        """Return what chooses the checkpoint, once all ranks have come to resume. Leaves if the pod is ending."""
        self._resumed = True
        self._writer.wait()
        if self._session.ends_untrained():
            self._session.leave()
        self._refuse_second_program()
        return Resumption(self._session, [_own_directory(self._session.settings)], by_framework=False)

    def _refuse_second_program(self) -> None:
        settings, context = self._session.settings, self._session.context()
        own, place = _own_directory(settings), settings.checkpoint_directory
        is_first = not context.leads_pod or not is_taken(settings.records_directory, own, place)
        if context.coordinator.agree(f"first/{self._session.next_number()}", is_first) is False:
            raise UsageError(
                ErrorKind.BAD_ARGUMENT,
                f"another training of this run saves in {place}, or has ended there: this one would resume from its "
                "checkpoints",
                hint="give each program of a run a name: Checkpointer(name=…)",
            )

    def _note_training(self) -> None:
        """Note that this program trains: not where it resumes, as one does that only reads a checkpoint."""
        if not self._trains:
            self._trains = True
            settings = self._session.settings
            self._session.note_training({_own_directory(settings): settings.checkpoint_directory}, ended=False)

    def _resume_from(self, newest: Record) -> Path:
        self._begins_at(newest.step)
        return self._session.context().local.path(newest.name)

    def _begins_at(self, step: int) -> None:
        self._schedule.saved(step, time.monotonic())
        self._session.note_stored(step)

    def should_save(
        self,
        step: int,
        every: Interval | None = None,
        *,
        recovery_point: str | timedelta | None = None,
        max_overhead: float = 0.0,
    ) -> bool:
        """Whether to save now. Call it once per step.

        True when a periodic save is due and the agent has room for it, when the pod is ending, and when somebody asked
        with `keepstep save`.

        Args:
            step: Optimizer steps that are done.
            every: Steps between periodic saves, or a duration: `"90s"`, `"10m"`, `"1.5h"` or a timedelta. 0 for no
                periodic saves. By default 100 steps, or none with a `recovery_point`. On several ranks rank 0's clock
                counts, and all ranks save at the same step.
            recovery_point: The oldest that the newest committed checkpoint may get, as a duration. The agent asks for
                saves in time, by what they take. Without an agent that does, they are this long apart.
            max_overhead: The largest share of the training's time that those saves may take, such as 0.01. By default
                the agent's `--max-overhead`.

        Raises:
            UsageError: `every` is neither steps nor a duration, or `recovery_point` or `max_overhead` makes no sense.
        """
        due = self.kind_due(step, every, recovery_point=recovery_point, max_overhead=max_overhead) is not None
        if due:
            self._schedule.told_to_save()
        return due

    def kind_due(
        self,
        step: int,
        every: Interval | None = None,
        *,
        recovery_point: str | timedelta | None = None,
        max_overhead: float = 0.0,
    ) -> Kind | None:
        """The kind of save that is due now, or None. `should_save` says only whether there is one.

        Args and errors as `should_save`.
        """
        if every is None:
            every = _EVERY_STEPS if recovery_point is None else 0
        interval = every if type(every) is int and every >= 0 else parse_interval(every)
        objective = None if recovery_point is None else parse_objective(recovery_point, max_overhead)
        if self._session.stopping or step < 0:
            return None
        step = int(step)
        self._schedule.at(step)
        if isinstance(interval, timedelta):
            self._request_if_due(interval)
        if objective is not None and not self._session.agent.keeps(objective.total_seconds(), max_overhead):
            self._request_if_due(objective)
        action = self._session.action_at(step)
        self._note_training()
        periodic = isinstance(interval, int) and self._schedule.is_due(interval)
        if action is Action.NOTHING and not periodic:
            return None
        kind = _kind_for(action)
        return kind if self._admit(step, kind) else None

    def save(
        self, step: int, kind: Kind | str | None = None, *, units: Mapping[str, float] | None = None
    ) -> AbstractContextManager[Path]:
        """Save the checkpoint of `step`: `with checkpointer.save(step) as directory:`, then write into `directory`.

        When the block has ended on all ranks, the checkpoint is made durable, is called `checkpoint-<step>` and is
        announced to the agent: at once, or while training continues if saves are asynchronous and the block used
        `torch.save` or safetensors' `save_file`. Such files are empty until then: a block that reads what it has saved
        needs `asynchronous=False`. Files of other names that lie in a folder `checkpoint-<step>` already stay there. If
        the block raises on any rank, nothing of the checkpoint stays.

        Args:
            step: Optimizer steps that are done.
            kind: `Kind.FINAL` for the last save of a run that ended by itself. By default just-in-time when the pod is
                ending, else periodic.
            units: What the program counts, of all ranks together and from the beginning of the run, such as
                `{"tokens": 1.2e9}`: for `keepstep report`.

        Returns:
            A context manager that gives the empty directory to write into.

        Raises:
            UsageError: `step`, `kind` or `units` makes no sense.
            VolumeError: The final checkpoint could not be saved. Any other save that fails because the volume is full
                or broken costs that checkpoint and one warning.
        """
        return SaveBlock(step, self._save(step, kind, checked_units(units or {})))

    def begin(self, step: int, kind: Kind | str | None = None) -> CheckpointWriter:
        """Begin a checkpoint that is written while training continues.

        Complete or abandon it, from any thread, before the next one begins. Waits for the last one if that is written
        by the thread of its `background`.

        Args:
            step: Optimizer steps that are done.
            kind: As for `save`.

        Returns:
            The writer, with the empty directory to write into.

        Raises:
            UsageError: `step` or `kind` makes no sense.
            VolumeError: There is no directory to write into, on all ranks. Or the last checkpoint is still being
                written, after an hour.
        """
        step, kind = self._checked(step, kind)
        if not self._free_writer(kind):
            raise VolumeError(
                ErrorKind.VOLUME_UNUSABLE,
                "the last checkpoint is still being written",
                hint="check whether the volume answers",
            )
        saving = self._started(step, kind)
        if saving.failure is not None:
            raise saving.failure
        return saving

    def reserve(self, size_bytes: int, *, on_all_ranks: bool = False) -> None:
        """Have the memory for the copy of a state of that size before the first save that is asynchronous.

        If there is too little, it does nothing, and the first save says so.

        Args:
            size_bytes: Of what this rank saves.
            on_all_ranks: All ranks of this machine save as much, and share its free memory.
        """
        if self._asynchronous:
            self._writer.reserve(size_bytes, ranks=self._session.settings.ranks.local_world_size if on_all_ranks else 1)

    def wait(self) -> bool:
        """Wait until the last save is complete or given up. Returns False if that takes more than an hour."""
        return self._writer.wait()

    def finish(self) -> None:
        """End the training: stop handling SIGTERM.

        Raises:
            SystemExit: With code 143 after a just-in-time save; with 75 if it was lost twice.
        """
        self._writer.close()
        self._forget_begun()
        if self._session.stopping:
            self._session.leave()
        settings = self._session.settings
        self._session.note_training({_own_directory(settings): settings.checkpoint_directory}, ended=True)
        self._session.close()

    def close(self) -> None:
        """Stop handling SIGTERM, without leaving. Idempotent. After `finish` it does nothing."""
        self._writer.close()
        self._forget_begun()
        # As after an error: a training that ends by itself calls `finish`.
        self._session.close(ended=False)

    @contextmanager
    def _save(self, step: int, kind: Kind | str | None, units: Mapping[str, float]) -> Iterator[Path]:
        step, wanted = self._checked(step, kind)
        self._free_writer(wanted)
        saving = self._started(step, wanted, units)
        is_final = wanted is Kind.FINAL
        if is_final and saving.failure is not None:
            raise saving.failure
        behind = saving.background
        try:
            with nullcontext() if behind is None else handing_in(behind):
                yield saving.directory
        except BaseException as error:
            if is_final or not saving.failed_by_volume(error):
                saving.abandon()
                raise
            saving.warn_given_up(saving.failure or error)
            if not saving.abandon_together():
                # The other ranks may wait for this one in the midst of writing: they must not meet its next step there.
                raise
            return
        if behind is not None and behind.has_files:
            # As after any save, a notice that has come needs no second one.
            chosen = Kind(kind) if kind is not None else _kind_for(self._session.action_at(saving.step))
            saving.complete_later(chosen)
            if chosen is not Kind.PERIODIC:
                self._writer.wait()
            return
        is_complete = saving.complete(
            None if kind is not None else lambda: _kind_for(self._session.action_at(saving.step))
        )
        if saving.failure is not None:
            saving.warn_given_up(saving.failure)
        elif is_final and not is_complete:
            raise final_checkpoint_lost(step)

    def _checked(self, step: int, kind: Kind | str | None) -> tuple[int, Kind]:
        step, chosen = _checked(step, kind)
        return step, chosen or _kind_for(self._session.action_at(step))

    def _free_writer(self, kind: Kind) -> bool:
        """Wait for the last save, or give it up for one of `kind`. Returns False if that takes more than an hour."""
        if kind is Kind.JUST_IN_TIME and self._asynchronous:
            self._session.make_time(self._writer)
        return self._writer.wait()

    def _started(self, step: int, kind: Kind, units: Mapping[str, float] = MappingProxyType({})) -> CheckpointWriter:
        self._warn_if_not_resumed(step)
        # With no room the user insists.
        pending = (self._admit(step, kind) and self._pending) or self._session.begin(step, kind)
        self._note_training()
        self._pending = None
        self._session.count(pending, units)
        self._schedule.saved(step, time.monotonic())
        return CheckpointWriter(
            self._session,
            replace(pending, kind=kind),
            keep_local=self._keep_local,
            writer=self._writer if self._asynchronous and kind is Kind.PERIODIC else None,
        )

    def _admit(self, step: int, kind: Kind) -> bool:
        """Ask for room; True when the save may go on."""
        if self._pending is not None and self._pending.step == step:
            return True
        self._forget_begun()
        # One rank may have evaluated for long, and by the contract they all come here.
        self._pending = self._session.admit(step, kind, seconds=WRITE_SECONDS)
        return self._pending is not None

    def _request_if_due(self, every: timedelta) -> None:
        """When the time has come, rank 0 asks all ranks to save at the same step."""
        if (
            self._schedule.timer_expired(every, time.monotonic())
            and self._session.context().coordinator.ranks.rank == 0
        ):
            self._session.request_save()

    def _warn_of_other_ranks(self, newest: Record) -> None:
        context = self._session.context()
        saved_by, now = newest.world_size, context.coordinator.ranks.world_size
        file = file_of_a_rank((file.path for file in newest.files), saved_by)
        if saved_by != now and file is not None and context.leads_pod:
            _log.warning(
                "%s was saved by %d ranks, each into a file of its own such as %s, and this job has %d: "
                "hint=start it with %d ranks, or have the program load and divide all of these files",
                *(newest.name, saved_by, file, now, saved_by),
            )

    def _warn_if_not_resumed(self, step: int) -> None:
        if self._resumed:
            return
        self._resumed = True
        context = self._session.context()
        try:
            own = _own_directory(self._session.settings)
            whole = context.local.whole(by_framework=False) if context.leads_pod else ()
            newest = max((record.step for record in whole if record.belongs_to == own), default=-1)
        except OSError:
            # The save itself meets what is wrong with the volume, on all ranks.
            return
        if newest >= step:
            _log.warning(
                "a checkpoint of step %d is here and nothing has read it, now step %d is saved: hint=call "
                "checkpointer.resume() before training, and load what it returns",
                newest,
                step,
            )

    def _forget_begun(self) -> None:
        if self._pending is not None:
            self._session.abort(self._pending)
        self._pending = None


def _own_directory(settings: Settings) -> str:
    """Return what records call the directory that this program saves in."""
    return directory_in(settings.checkpoint_directory, settings.volume, settings.run_directory)


def _kind_for(action: Action) -> Kind:
    return Kind.JUST_IN_TIME if action is Action.SAVE_AND_EXIT else Kind.PERIODIC


def _checked(step: int, kind: Kind | str | None) -> tuple[int, Kind | None]:
    if int(step) < 0:
        raise UsageError(ErrorKind.BAD_ARGUMENT, f"step is {step}", hint="count optimizer steps from 0")
    try:
        return int(step), None if kind is None else Kind(kind)
    except ValueError as error:
        allowed = ", ".join(Kind)
        raise UsageError(ErrorKind.BAD_ARGUMENT, f"kind is {kind!r}", hint=f"use one of: {allowed}") from error
