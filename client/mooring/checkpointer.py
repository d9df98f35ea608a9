"""The one entry point for a training loop: resume, ask whether to save, save, stop in time.

Owns which step is saved and what is still being written. Never hurts training: past the constructor it raises only what
the user's own code raised while saving, UsageError for arguments that make no sense, VolumeError when there is nothing
to resume from or the last save of all is lost, and RanksError when ranks stay away from a resume. Every rank of a job
makes one and calls the same methods at the same steps; the ranks of a pod share its directory.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from mooring.autoload.post_import import reason
from mooring.checkpoint_writer import CheckpointWriter
from mooring.checkpoints.records import Kind
from mooring.errors import ErrorKind, UsageError, VolumeError
from mooring.gate import Action
from mooring.integrations.ownership import Owner, claim
from mooring.ranks.coordinator import WRITE_SECONDS
from mooring.session import PendingSave, Session
from mooring.settings import read_settings

_log: Final = logging.getLogger("mooring")


class Checkpointer:
    """Saves checkpoints below one directory and tells the agent of each; without an agent it does the same, alone.

    `directory`, `volume` and `socket` come from the environment that `mooring run` and the injection set, else
    everything is below ./checkpoints. `keep_local` complete checkpoints stay on the local disk. `rank0_only`: this
    process saves for all ranks, and the others make no Checkpointer. Raises UsageError or VolumeError. SIGTERM belongs
    to it until `finish`.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        volume: str | Path | None = None,
        socket: str | Path | None = None,
        keep_local: int = 1,
        rank0_only: bool = False,
    ) -> None:
        if keep_local < 1:
            raise UsageError(ErrorKind.BAD_ARGUMENT, f"keep_local is {keep_local}", hint="keep at least one checkpoint")
        settings = read_settings(os.environ, directory=directory, volume=volume, socket=socket)
        self._keep_local = keep_local
        self._pending: PendingSave | None = None
        self._last_step: int | None = None
        self._session = Session(settings, rank0_only=rank0_only)
        claim(Owner.CHECKPOINTER)

    @property
    def stopping(self) -> bool:
        """The pod is ending and the just-in-time save is made: leave the loop."""
        return self._session.stopping

    def resume(self) -> Path | None:
        """The newest complete checkpoint to continue from, the same on all ranks; None to begin afresh.

        Raises VolumeError when the pods of the job have checkpoints, but none in common, RanksError when some ranks do
        not come, and SystemExit(143) when the pod is known to end and no step was done yet.
        """
        if self._session.ends_untrained():
            self._session.leave()
        local = self._session.context.local
        newest = self._session.choose(local.whole())
        if newest is None:
            return None
        self._last_step = newest.step
        _log.info("resuming: name=%s step=%d", newest.name, newest.step)
        return local.path(newest.name)

    def should_save(self, step: int, every: int = 100) -> bool:
        """Whether to save now: every `every` steps (0: never by itself), and when the pod is ending or someone asked.

        Call it once per step. The agent is asked only when a save is due, and may say that there is no room.
        """
        if self._session.stopping or step < 0:
            return False
        ask = self._session.ask(step)
        if ask is Action.NOTHING and (every < 1 or step < 1 or step % every or step == self._last_step):
            return False
        return self._admit(int(step), _kind_for(ask))

    @contextmanager
    def save(self, step: int, kind: Kind | str | None = None) -> Iterator[Path]:
        """A directory to write the checkpoint of `step` into: `with checkpointer.save(step) as directory: …`.

        When the block ends on all ranks it becomes `checkpoint-<step>` and is announced; when it raises on one, nothing
        of it stays. What it raises goes through, unless the volume is to blame, full for example: that costs the
        checkpoint and one warning, as it does when not even the directory can be made. `kind` is needed for the last
        save of a run that ended by itself: Kind.FINAL, after which there is no other, so that its failure is raised.
        Raises UsageError, and VolumeError for Kind.FINAL.
        """
        saving = self._started(step, kind)
        is_final = kind == Kind.FINAL
        if is_final and saving.failure is not None:
            raise saving.failure
        try:
            yield saving.directory
        except BaseException as error:
            if is_final or not saving.failed_by_volume(error):
                saving.abandon()
                raise
            _warn_given_up(step, saving.failure or error)
            if not saving.abandon_together():
                # The other ranks may wait for this one in the midst of writing: they must not meet its next step there.
                raise
            return
        # A notice that came while this was written needs no second save.
        is_complete = saving.complete(None if kind is not None else lambda: _kind_for(self._session.ask(saving.step)))
        if saving.failure is not None:
            _warn_given_up(step, saving.failure)
        elif is_final and not is_complete:
            raise VolumeError(
                ErrorKind.VOLUME_UNUSABLE,
                f"the final checkpoint of step {step} was lost",
                hint="a warning above says why",
            )

    def begin(self, step: int, kind: Kind | str | None = None) -> CheckpointWriter:
        """The same in two parts, for a checkpoint that is written while training goes on: see Saving.

        Complete or abandon it, from any thread, before the next one begins. Raises UsageError, and VolumeError on all
        ranks when there is no directory to write into.
        """
        saving = self._started(step, kind)
        if saving.failure is not None:
            raise saving.failure
        return saving

    def _started(self, step: int, kind: Kind | str | None) -> CheckpointWriter:
        step, chosen = _checked(step, kind)
        wanted = chosen or _kind_for(self._session.ask(step))
        # With no room the user insists.
        pending = (self._admit(step, wanted) and self._pending) or self._session.begin(step, wanted)
        self._pending = None
        self._last_step = step
        return CheckpointWriter(self._session, replace(pending, kind=wanted), keep_local=self._keep_local)

    def finish(self) -> None:
        """The end of training: let go of SIGTERM. After a just-in-time save it leaves, with SystemExit(143)."""
        self._forget_begun()
        if self._session.stopping:
            self._session.leave()
        self._session.close()

    def close(self) -> None:
        """Let go of SIGTERM, and stay; idempotent. After `finish` has left it does nothing."""
        self._forget_begun()
        self._session.close()

    def _admit(self, step: int, kind: Kind) -> bool:
        """Action for room; True when the save may go on."""
        if self._pending is not None and self._pending.step == step:
            return True
        self._forget_begun()
        # One rank may have evaluated for long, and by the contract they all come here.
        self._pending = self._session.admit(step, kind, seconds=WRITE_SECONDS)
        return self._pending is not None

    def _forget_begun(self) -> None:
        if self._pending is not None:
            self._session.abort(self._pending)
        self._pending = None


def _warn_given_up(step: int, error: BaseException) -> None:
    hint = getattr(error, "hint", "") or "see whether the volume is full"
    # Its words alone: what the error refers to may keep a deleted file open, and its room taken.
    _log.warning("checkpoint given up, training goes on: step=%d error=%s hint=%s", step, reason(error), hint)


def _kind_for(ask: Action) -> Kind:
    return Kind.JUST_IN_TIME if ask is Action.SAVE_AND_EXIT else Kind.PERIODIC


def _checked(step: int, kind: Kind | str | None) -> tuple[int, Kind | None]:
    if int(step) < 0:
        raise UsageError(ErrorKind.BAD_ARGUMENT, f"step is {step}", hint="count optimizer steps from 0")
    try:
        return int(step), None if kind is None else Kind(kind)
    except ValueError as error:
        allowed = ", ".join(Kind)
        raise UsageError(ErrorKind.BAD_ARGUMENT, f"kind is {kind!r}", hint=f"use one of: {allowed}") from error
