"""The one entry point for a training loop: resume, ask whether to save, save, stop in time.

Owns the order of a save: write under a temporary name, make durable, rename, record, announce, rotate. Never hurts
training: past the constructor it raises only what the user's own code raised while saving, UsageError for arguments
that make no sense, and VolumeError when there is nowhere to save to. One process and one thread; the place of a job
with several is the gate, the save id and `resume`.
"""

import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from mooring.agent import Agent
from mooring.errors import ErrorKind, UsageError, VolumeError
from mooring.gate import Ask, Gate, SingleProcessGate
from mooring.liveness import hold_liveness_lock
from mooring.local_checkpoints import LocalCheckpoints
from mooring.records import Kind, Record
from mooring.settings import Settings, read_settings
from mooring_api import names

_log: Final = logging.getLogger("mooring")
_KEEP_UNANNOUNCED: Final = 2
"""Complete checkpoints kept while nobody else has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """A save that was given an id; `admitted_by_agent` when the agent keeps room for it."""

    step: int
    save: str
    admitted_by_agent: bool


class Checkpointer:
    """Saves checkpoints below one directory and tells the agent of each; without an agent it does the same, alone.

    `directory`, `volume` and `socket` come from the environment that `mooring run` and the injection set, else
    everything is below ./checkpoints. `keep_local` complete checkpoints stay on the local disk. Raises UsageError or
    VolumeError. SIGTERM belongs to it until `finish`.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        volume: str | Path | None = None,
        socket: str | Path | None = None,
        keep_local: int = 1,
    ) -> None:
        if keep_local < 1:
            raise UsageError(ErrorKind.BAD_ARGUMENT, f"keep_local is {keep_local}", hint="keep at least one checkpoint")
        settings = read_settings(os.environ, directory=directory, volume=volume, socket=socket)
        self._keep_local = keep_local
        self._nonce = secrets.token_hex(4)
        self._counter = 0
        self._begun: _Begun | None = None
        self._unannounced: Record | None = None
        self._last_step: int | None = None
        self._agent_knows_notice = False
        self._stopping = False
        self._local = LocalCheckpoints(
            settings.checkpoint_directory, settings.state_directory / names.RECORDS_DIRECTORY, self._nonce
        )
        lives = self._prepare(settings)
        self._gate: Gate = SingleProcessGate(settings.state_directory / names.DOORBELL)
        self._agent = Agent(settings.socket, attempt=self._nonce, holds_liveness_lock=lives)
        if self._agent.terminating:
            self._gate.notice()

    @property
    def stopping(self) -> bool:
        """The pod is ending and the just-in-time save is made: leave the loop."""
        return self._stopping

    def resume(self) -> Path | None:
        """The newest complete checkpoint to continue from; None to begin afresh."""
        # Every process of the job is in this pod, so that a local checkpoint counts without being committed.
        newest = self._local.newest()
        if newest is None:
            return None
        self._last_step = newest.step
        _log.info("resuming: name=%s step=%d", newest.name, newest.step)
        return self._local.path(newest.name)

    def should_save(self, step: int, every: int = 100) -> bool:
        """Whether to save now: every `every` steps (0: never by itself), and when the pod is ending or someone asked.

        Call it once per step. The agent is asked only when a save is due, and may say that there is no room.
        """
        if self._stopping or step < 0:
            return False
        ask = self._gate.at(step)
        if self._unannounced is not None and ask is not Ask.STOP and self._agent.is_back():
            self._announce(self._unannounced, urgent=False)
        if ask is Ask.NOTHING and (every < 1 or step < 1 or step % every or step == self._last_step):
            return False
        return self._admit(int(step), _kind_for(ask))

    @contextmanager
    def save(self, step: int, kind: Kind | str | None = None) -> Iterator[Path]:
        """A directory to write the checkpoint of `step` into: `with checkpointer.save(step) as directory: …`.

        When the block ends it becomes `checkpoint-<step>` and is announced; when it raises, nothing of it stays.
        `kind` is needed for the last save of a run that ended by itself: Kind.FINAL. Raises UsageError, VolumeError.
        """
        step, chosen = _checked(step, kind)
        name = f"checkpoint-{step}"
        begun = self._begin(step, chosen or _kind_for(self._gate.at(step)))
        try:
            temporary = self._local.begin(name)
        except OSError as error:
            self._abort(begun)
            raise VolumeError(
                ErrorKind.VOLUME_UNUSABLE, f"cannot save {name}: {error}", hint="see whether the volume is full"
            ) from error
        try:
            yield temporary
        except BaseException:
            self._local.abandon(name)
            self._abort(begun)
            raise
        # A notice that came while this was written needs no second save.
        self._complete(name, begun, chosen or _kind_for(self._gate.at(step)))

    def finish(self) -> None:
        """The end of training: let go of SIGTERM. After a just-in-time save it leaves, with SystemExit(143)."""
        if self._begun is not None:
            self._abort(self._begun)
        self._tell_notice()
        if self._unannounced is not None:
            self._announce(self._unannounced, urgent=False)
        self._gate.close()
        if self._stopping:
            raise SystemExit(names.JUST_IN_TIME_EXIT_CODE)

    def _prepare(self, settings: Settings) -> bool:
        try:
            settings.checkpoint_directory.mkdir(parents=True, exist_ok=True)
            lives = hold_liveness_lock(settings.state_directory / names.RANKS_DIRECTORY / "0")
            if lives:
                self._local.clean_up()
        except OSError as error:
            raise VolumeError(
                ErrorKind.VOLUME_UNUSABLE,
                f"{settings.volume} cannot be written: {error}",
                hint="give a directory that this user may write, see Checkpointer(directory=…)",
            ) from error
        if not lives:
            _log.warning("another process of this run is alive: volume=%s", settings.volume)
        return lives

    def _admit(self, step: int, kind: Kind) -> bool:
        """Ask for room; True when the save may go on."""
        if self._begun is not None and self._begun.step == step:
            return True
        if self._begun is not None:
            self._abort(self._begun)
        self._counter += 1
        # Not of the agent's form: it counts by itself, and no id may come twice.
        own = _Begun(step=step, save=f"{self._nonce}-c{self._counter:06d}", admitted_by_agent=False)
        self._tell_notice()
        was_away = self._agent.away
        admission = self._agent.begin_save(step=step, kind=kind)
        if admission is not None and was_away and self._unannounced is not None and kind is not Kind.JUST_IN_TIME:
            # The agent is back, and has time for it while the next one is written.
            self._announce(self._unannounced, urgent=False)
        if admission is None:
            self._begun = own
        elif admission.admitted:
            self._begun = _Begun(step=step, save=admission.save or own.save, admitted_by_agent=True)
        else:
            _log.warning("save not admitted: step=%d reason=%s", step, admission.reason)
            if kind is Kind.JUST_IN_TIME:
                self._begun = own
        return self._begun is not None

    def _begin(self, step: int, kind: Kind) -> _Begun:
        if not self._admit(step, kind):
            # The user insists.
            self._begun = _Begun(step=step, save=f"{self._nonce}-c{self._counter:06d}", admitted_by_agent=False)
        assert self._begun is not None
        return self._begun

    def _abort(self, begun: _Begun) -> None:
        self._begun = None
        if begun.admitted_by_agent:
            self._agent.abort_save(begun.save)

    def _complete(self, name: str, begun: _Begun, kind: Kind) -> None:
        self._begun = None
        # For good: a final save after it makes the run no more complete than it was.
        self._stopping |= kind is Kind.JUST_IN_TIME
        self._tell_notice()
        try:
            files = self._local.publish(name)
        except OSError as error:
            _log.warning("checkpoint lost: name=%s error=%s", name, error)
            self._local.abandon(name)
            self._abort(begun)
            return
        record = Record(
            name=name, step=begun.step, save=begun.save, kind=kind, world_size=1, saved_at=time.time(), files=files
        )
        self._last_step = record.step
        announced = self._keep(record)
        _log.info("saved: name=%s kind=%s save=%s announced=%s", name, kind, record.save, announced)

    def _keep(self, record: Record) -> bool:
        """Record, announce and rotate; whether it was announced. A record that fails stops only the rotation."""
        try:
            self._local.record(record)
            recorded = True
        except OSError as error:
            _log.warning("checkpoint not recorded, it cannot be resumed from: name=%s error=%s", record.name, error)
            recorded = False
        # There will be no save after a just-in-time one.
        announced = self._announce(record, urgent=record.kind is Kind.JUST_IN_TIME)
        if recorded:
            try:
                self._local.rotate(record, self._keep_local if announced else max(self._keep_local, _KEEP_UNANNOUNCED))
            except OSError as error:
                _log.warning("older checkpoint not removed: error=%s", error)
        return announced

    def _announce(self, record: Record, *, urgent: bool) -> bool:
        announced = self._agent.announce(
            path=self._local.path(record.name), step=record.step, kind=record.kind, save=record.save, urgent=urgent
        )
        self._unannounced = None if announced else record
        if announced:
            try:
                self._local.record(replace(record, announced=True))
            except OSError as error:
                # Its record still asks for an agent, and the agent knows it already.
                _log.debug("announcement not recorded: name=%s error=%s", record.name, error)
        return announced

    def _tell_notice(self) -> None:
        """Once, and again at the next call when the agent was away."""
        if self._gate.signalled and not self._agent_knows_notice:
            self._agent_knows_notice = self._agent.notify_termination("client-sigterm")


def _kind_for(ask: Ask) -> Kind:
    return Kind.JUST_IN_TIME if ask is Ask.STOP else Kind.PERIODIC


def _checked(step: int, kind: Kind | str | None) -> tuple[int, Kind | None]:
    if int(step) < 0:
        raise UsageError(ErrorKind.BAD_ARGUMENT, f"step is {step}", hint="count optimizer steps from 0")
    try:
        return int(step), None if kind is None else Kind(kind)
    except ValueError as error:
        allowed = ", ".join(Kind)
        raise UsageError(ErrorKind.BAD_ARGUMENT, f"kind is {kind!r}", hint=f"use one of: {allowed}") from error
