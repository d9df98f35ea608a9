"""What a training resumes from: the same checkpoint on all ranks, the newest of its own that every pod can have.

A checkpoint belongs to the output directory that it was saved in, and only a training of that directory resumes from
it: the next stage of a job, or another fold, does not. Where a restore step ran before the program, the choice is the
newest that is whole in every pod. With lazy restore nothing was chosen before: the ranks decide here, after they have
met, among what lies in their volumes and what is committed at the destination, and each pod's agent brings what it
lacks. So it does not matter what was started: a new job, a suspended one, a replaced pod, or containers that were
restarted in place. If one pod finds the choice damaged, all choose again without it.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from keepstep.agent_client.restores import FileRange, Restores
from keepstep.autoload.post_import import warn
from keepstep.checkpoints.local_checkpoints import LocalCheckpoints
from keepstep.checkpoints.records import Record
from keepstep.errors import ErrorKind, RanksError, RestoreError, VolumeError
from keepstep.ranks.coordinator import WRITE_SECONDS
from keepstep.session import Session
from keepstep_api import names
from keepstep_api.records import directory_key

_log: Final = logging.getLogger("keepstep")
_MOST_SAID: Final = 3

_Bring = Callable[[Restores, str, Callable[[str], None]], object]
"""Brings to this pod what it must have of a save before all ranks resume from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialCheckpoint:
    """A checkpoint of which only parts are on this volume. `fetch` has more brought, and returns where to read it.

    `fetch` raises RestoreError if the checkpoint is damaged: then all ranks choose again. It waits for the agent. `ask`
    does not: the agent brings these ranges, in this order, while the caller does something else.
    """

    step: int
    ask: Callable[[Sequence[FileRange]], None]
    fetch: Callable[[Sequence[FileRange]], Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class SomeFiles:
    """A checkpoint of which some files are on this volume, in `directory`. `files`: the paths of all, unless too many.

    `place` is where it would have its name.
    """

    place: Path
    directory: Path
    files: Sequence[str]


class Resumption:
    """What one training resumes from, the same on all ranks. Says it in one line, with what was passed over.

    Its methods raise VolumeError when pods have checkpoints, but none in common, RanksError when some ranks do not
    come, and RestoreError when there may be a checkpoint that cannot be had.

    Args:
        session: Of this process.
        outputs: The training's own output directories, as records call them: it resumes from no other's checkpoints.
            None: of any, for a program that names no directory.
        by_framework: Whether it may resume from what frameworks wrote.
    """

    def __init__(self, session: Session, outputs: Sequence[str] | None, *, by_framework: bool = True) -> None:
        self._session = session
        self._outputs = outputs
        self._by_framework = by_framework
        self._passed_over: dict[str, str] = {}
        """The newest checkpoint of each other output directory, as far as they lie here."""

    def choose(self) -> Record | None:
        """Return the checkpoint to resume from, which is whole on this volume; None to start from step 0."""
        chosen = self._choose()
        self._say(chosen)
        return chosen

    def choose_or(self, found: Path | None, step: int) -> Path | None:
        """As `choose`, where the framework may find a checkpoint of that step by itself; return the path.

        It may lie outside the volume and outlive a pod. Then it is taken if it is newer, and of one step on all ranks.
        """
        chosen = self._choose()
        session = self._session
        is_outside = found is not None and not found.resolve().is_relative_to(session.settings.volume.resolve())
        # On all ranks, whatever each of them has found.
        is_one = session.context().coordinator.same(f"resume/{session.next_number()}/found", str((is_outside, step)))
        if found is not None and is_one and (chosen is None or (is_outside and step > chosen.step)):
            self._tell(f"resuming from {found}, which the program found")
            return found
        place = None if chosen is None else self._local.place(chosen)
        if found is not None and (place is None or place.resolve() != found.resolve()):
            self._passed_over[""] = f"{found}, which the program found"
        self._say(chosen)
        return place

    def bring(self, place: Path) -> bool:
        """Have a checkpoint brought back that the chosen one refers to; return whether it is there in all pods.

        `place`: where it was saved, in the first of the training's own output directories.
        """
        session = self._session
        key = f"resume/{session.next_number()}/referred"
        if session.context().leads_pod and not place.exists():
            output_key = directory_key(self._outputs[0]) if self._outputs else None
            try:
                restores = _restores(session)
                found = restores.newest(_waiting(session), output_key, name=place.name)
                if found:
                    restores.fetch(found[0][1], None, _waiting(session))
            except RestoreError as error:
                _log.warning("not restored: path=%s error=%s hint=%s", place, error, error.hint)
            except SystemExit:
                session.context().coordinator.agree(key, ok=False)
                raise
        is_here = not session.context().leads_pod or place.exists()
        return bool(session.context().coordinator.agree(key, is_here, seconds=WRITE_SECONDS))

    def _choose(self) -> Record | None:
        chosen = self._chosen(_bring_all)
        if not isinstance(chosen, tuple):
            return chosen
        step, save = chosen
        found = next((record for record in self._whole() if record.save == save), None)
        if found is None:
            raise RestoreError(
                ErrorKind.NOT_RESTORED,
                f"the agent has brought the checkpoint of step {step}, and it is not in "
                f"{self._session.settings.volume}",
                hint="the program and its agent must share one volume and one checkpoint directory",
            )
        return found

    def choose_partial(self, first: Sequence[FileRange]) -> PartialCheckpoint | Record | None:
        """As `choose`, for a reader that knows what it needs: only `first` is brought, and only to the pod of rank 0.

        Returns a record if the checkpoint is whole here, and nothing needs to be brought.
        """
        session = self._session
        is_first = session.context().coordinator.ranks.rank == 0

        def bring(restores: Restores, save: str, waiting: Callable[[str], None]) -> object:
            # The others' agents read the manifests meanwhile, and so are ready for what is asked of them next.
            return restores.fetch(save, first, waiting) if is_first else restores.files(save, waiting)

        chosen = self._chosen_in_part(bring)
        if not isinstance(chosen, tuple):
            return chosen
        step, save = chosen
        return PartialCheckpoint(
            step=step,
            ask=lambda ranges: _restores(session).ask(save, ranges),
            fetch=lambda ranges: _restores(session).fetch(save, ranges, _waiting(session)),
        )

    def choose_files(self, needed: Callable[[Sequence[str]], Sequence[str]]) -> SomeFiles | Record | None:
        """As `choose`, for a reader that needs some of the files: `needed` chooses among the paths of all; none: all.

        Returns a record if the checkpoint is whole here.
        """
        session = self._session
        if not session.settings.lazy or session.holds_whole_job:
            return self.choose()

        def bring(restores: Restores, save: str, waiting: Callable[[str], None]) -> tuple[Path, Path, Sequence[str]]:
            place, files = restores.files(save, waiting)
            ranges = [(path, 0, 0) for path in needed(files)]
            return place, restores.fetch(save, ranges or None, waiting), files

        chosen = self._chosen_in_part(bring)
        if not isinstance(chosen, tuple):
            return chosen
        step, save = chosen
        # It is here already; an agent that was started again meanwhile verifies it once more.
        key = f"resume/{session.next_number()}/read"
        try:
            place, directory, files = bring(_restores(session), save, _waiting(session))
        except (RestoreError, SystemExit):
            # No other rank may wait for this one.
            session.context().coordinator.agree(key, ok=False)
            raise
        if not session.context().coordinator.agree(key, ok=True, seconds=WRITE_SECONDS):
            raise _not_had_by_another(step)
        return SomeFiles(place=place, directory=directory, files=files)

    @property
    def _local(self) -> LocalCheckpoints:
        return self._session.context().local

    def _chosen(self, bring: _Bring) -> Record | tuple[int, str] | None:
        """Return a local checkpoint, or the step and save of a committed one, after `bring`."""
        return self._choose_any(bring) if self._session.settings.lazy else self._choose_local()

    def _chosen_in_part(self, bring: _Bring) -> Record | tuple[int, str] | None:
        """As `_chosen`, and say what it is."""
        chosen = self._chosen(bring)
        if isinstance(chosen, tuple):
            self._tell(f"resuming from step {chosen[0]}, as far as it is read")
        else:
            self._say(chosen)
        return chosen

    def _whole(self) -> Sequence[Record]:
        """Return the whole checkpoints on this volume that may be resumed from, the newest first."""
        found = []
        for record in self._local.whole(by_framework=self._by_framework):
            if self._outputs is None or record.belongs_to in self._outputs:
                found.append(record)
            else:
                of = record.belongs_to or "checkpoints"
                self._passed_over.setdefault(of, f"{self._local.place(record)}, of another output directory")
        return found

    def _choose_local(self) -> Record | None:
        session, records = self._session, self._whole()
        # With several pods, each pod wrote only its own part, so only restored checkpoints are whole there.
        usable = {(one.step, one.save): one for one in records if one.committed or session.holds_whole_job}
        number = session.next_number()
        chosen = session.context().coordinator.choose_newest(f"resume/{number}", list(usable))
        if chosen is None:
            _require_all_afresh(session, number, has_none=not records)
        step, key = session.agent.newest_committed or (-1, "")
        is_own = self._outputs is None or key in map(directory_key, self._outputs)
        if is_own and step > (chosen[0] if chosen else -1):
            _log.warning("a newer checkpoint is committed: step=%d hint=run `keepstep restore` first", step)
        return usable[chosen] if chosen else None

    def _choose_any(self, bring: _Bring) -> Record | tuple[int, str] | None:
        """Choose among what pods have and what is committed, and `bring` it to each pod."""
        session = self._session
        context = session.context()
        while True:  # ends: a checkpoint that a pod found damaged is not offered by that pod again
            number = session.next_number()
            progress = f"resume/{number}/listing"
            # Of a job in several pods, no pod's own part is enough. What came from the destination may be damaged by
            # now.
            records = self._whole() if session.holds_whole_job else ()
            own = {(record.step, record.save): record for record in records if not record.committed}
            offered: Sequence[tuple[int, str]] | None = None
            try:
                if context.leads_pod:
                    offered = [*own, *self._committed(progress, can_do_without=bool(own))]
                chosen = context.coordinator.choose_newest(f"resume/{number}", offered, progress=progress)
            except (RestoreError, SystemExit):
                # No other rank may wait for this one.
                context.coordinator.withdraw(f"resume/{number}")
                raise
            except RanksError:
                if session.told_to_end:
                    raise SystemExit(names.JUST_IN_TIME_EXIT_CODE) from None
                raise
            if chosen is None:
                _require_all_afresh(session, number, has_none=not offered)
                return None
            if chosen in own:
                return own[chosen]
            if _is_brought(session, number, chosen, bring):
                return chosen

    def _committed(self, progress: str, *, can_do_without: bool) -> Sequence[tuple[int, str]]:
        """Return the committed checkpoints that this pod can have. Raises RestoreError."""
        keys = [None] if self._outputs is None else [directory_key(output) for output in self._outputs]
        restores = _restores(self._session)
        found: list[tuple[int, str]] = []
        damaged: RestoreError | None = None
        for key in keys:
            try:
                found += restores.newest(_waiting(self._session, progress), key)
            except RestoreError as error:
                # All of that output directory are damaged.
                if error.kind is not ErrorKind.CHECKPOINT_DAMAGED:
                    raise
                damaged = error
        if damaged is not None and not found and not can_do_without:
            raise damaged
        return found

    def _say(self, chosen: Record | None) -> None:
        if chosen is not None:
            self._tell(f"resuming from step {chosen.step}: {self._local.place(chosen)}")
            return
        own, session = self._outputs, self._session
        places = [session.settings.volume] if own is None else [self._local.folder(output) for output in own]
        what = f"starting from step 0, there is no checkpoint in {' or in '.join(map(str, places))}"
        if session.settings.lazy and own is not None and session.context().coordinator.ranks.rank == 0:
            # Only a line for people: no trouble with it may end this rank alone.
            with suppress(RestoreError):
                others = _restores(session).newest(lambda line: None, None)
                if others:
                    self._passed_over["destination"] = f"{len(others)} at the destination, of other output directories"
        if self._passed_over:
            # Nobody should begin anew by mistake.
            self._tell(what)
        else:
            _log.info("%s", what)

    def _tell(self, what: str) -> None:
        """Write the line of this start. In a run it is seen, also if the program configures no logging."""
        if self._session.context().coordinator.ranks.rank == 0:
            say = warn if self._session.settings.socket is not None else _log.info
            over = [place for _, place in sorted(self._passed_over.items())]
            more = f" and {len(over) - _MOST_SAID} more" if len(over) > _MOST_SAID else ""
            say(f"{what}; passed over: {', '.join(over[:_MOST_SAID])}{more}" if over else what)


def _bring_all(restores: Restores, save: str, waiting: Callable[[str], None]) -> Path:
    return restores.fetch(save, None, waiting)


class _Overruled(Exception):  # noqa: N818 - it ends a wait, and is no error
    """Another pod has found that the choice cannot be had: what this one brings of it is of no use."""


def _is_brought(session: Session, number: int, chosen: tuple[int, str], bring: _Bring) -> bool:
    """Have the choice brought to every pod; return False if a pod found it damaged. Raises RestoreError."""
    coordinator = session.context().coordinator
    key, progress = f"resume/{number}/here", f"resume/{number}/progress"
    failure: RestoreError | None = None
    if session.context().leads_pod:
        try:
            bring(_restores(session), chosen[1], _waiting(session, progress, ends_with=key))
        except RestoreError as error:
            failure = error
            _log.warning("not restored: step=%d error=%s hint=%s", chosen[0], error, error.hint)
        except _Overruled:
            pass
        except SystemExit:
            # No other rank may wait for this one.
            coordinator.agree(key, ok=False)
            coordinator.agree(f"{key}/again", ok=False)
            raise
    is_here_everywhere = coordinator.agree(key, failure is None, seconds=WRITE_SECONDS, progress=progress)
    if is_here_everywhere:
        return True
    may_choose_again = failure is None or failure.kind is ErrorKind.CHECKPOINT_DAMAGED
    if is_here_everywhere is not None and coordinator.agree(f"{key}/again", may_choose_again):
        return False
    if session.told_to_end:
        raise SystemExit(names.JUST_IN_TIME_EXIT_CODE)
    raise failure or _not_had_by_another(chosen[0])


def _not_had_by_another(step: int) -> RestoreError:
    return RestoreError(
        ErrorKind.NOT_RESTORED,
        f"another rank cannot have the checkpoint of step {step}, or has not come",
        hint="see the logs of the other ranks",
    )


def _waiting(session: Session, progress: str = "", *, ends_with: str = "") -> Callable[[str], None]:
    """Return what to do while the agent is asked: tell the other ranks, and leave when the pod ends.

    `ends_with`: the agreement that makes waiting useless once it is answered.
    """
    began_at = time.monotonic()

    def waiting(line: str) -> None:
        if session.told_to_end:
            # There is nothing to save yet.
            raise SystemExit(names.JUST_IN_TIME_EXIT_CODE)
        if progress:
            # The seconds show that this rank is alive while nothing arrives.
            coordinator = session.context().coordinator
            coordinator.publish(progress, f"{line} after {time.monotonic() - began_at:.0f} s")
            if ends_with and coordinator.is_answered(ends_with):
                raise _Overruled

    return waiting


def _restores(session: Session) -> Restores:
    restores = session.agent.restores()
    if restores is None:
        raise RestoreError(
            ErrorKind.NOT_RESTORED,
            "nobody knows what to resume from: restore is lazy, and there is no agent",
            hint="start the program with `keepstep run` or in an injected pod, or unset KEEPSTEP_RESTORE",
        )
    return restores


def _require_all_afresh(session: Session, number: int, *, has_none: bool) -> None:
    """Raise an error unless no rank has anything to resume from."""
    afresh = session.context().coordinator.agree(f"resume/{number}/afresh", ok=has_none)
    if afresh is None:
        raise RanksError(
            ErrorKind.RANKS_LATE,
            "not all ranks came to say whether they have a checkpoint",
            hint="a warning above names the ranks; their logs show what they do before they resume",
        )
    if not afresh:
        raise VolumeError(
            ErrorKind.VOLUME_UNUSABLE,
            "the pods of this job have checkpoints, but none that is whole in all of them",
            hint="run `keepstep restore` in every pod before training, or empty the volumes to start anew",
        )
