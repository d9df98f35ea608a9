"""A run whose checkpoints a framework writes: when it must save and stop, and how its checkpoints reach the agent.

Owns when a framework's checkpoint is written, moved and announced, and the one run of this process. Must not know any
framework. Once made, a run raises only SystemExit, from `leave` and `newest`, UsageError where a training is refused,
and what the framework raises as it writes.
"""

import atexit
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn, TypeVar

from keepstep.asynchronous_saves.background_writer import BackgroundWriter
from keepstep.asynchronous_saves.save_functions import handing_in
from keepstep.autoload.post_import import reason, warn
from keepstep.checkpoints.links import break_links, link_tree, put_beside
from keepstep.checkpoints.records import Kind, Record, read_records
from keepstep.checkpoints.trainings import is_taken
from keepstep.errors import ErrorKind, KeepstepError, UsageError
from keepstep.framework_run.after_save import BackgroundWrites, UnannouncedSave, wait_until_quiet
from keepstep.framework_run.output_directories import OutputDirectories
from keepstep.gate import Action
from keepstep.publishing import Publication
from keepstep.ranks.coordinator import PATIENCE_SECONDS
from keepstep.resuming import Resumption, SomeFiles
from keepstep.session import PendingSave, Session
from keepstep.settings import read_settings

_log: Final = logging.getLogger("keepstep")
_Result = TypeVar("_Result")
_END_SECONDS: Final = 10.0
"""Wait at the end for ranks that may have ended already."""
_MOST_FROM_ONE_COPY: Final = 4
"""How many checkpoints may be written from one copy: a step that stands still would have its memory grow."""


class FrameworkRun:
    """Every rank has one and calls the same methods in the same order. `current` returns the one of this process."""

    asynchronous_by_program: ClassVar[bool | None] = None
    """Whether the program asks for asynchronous saves; None if it leaves that to the environment."""
    _current: "FrameworkRun | None" = None
    _in_training: ClassVar[bool] = False
    """Whether a framework's training is under way in this process."""
    _trained: ClassVar[set[str]] = set()
    """The output directories of the trainings of this process."""

    def __init__(self) -> None:
        """Raises UsageError or VolumeError."""
        self._session = Session(read_settings(os.environ))
        self._pending: PendingSave | None = None
        self._exit_asked = False
        self._given_up = False
        self.directories: Final = OutputDirectories(
            self._session.settings, self._session.agent.tell_unprotected, self._session.context
        )
        self._writes = BackgroundWrites()
        self._writer = BackgroundWriter()
        self._copied_step = -1
        self._written_from_copy = 0
        """How many checkpoints are written from the last copy."""
        self._saved: UnannouncedSave | None = None
        """What is not announced yet."""
        self._last: UnannouncedSave | None = None
        self._behind: set[Path] = set()
        """Where checkpoints belong that are being written behind the training."""
        self._waiting: tuple[threading.Thread, threading.Event] | None = None
        """What announces the last checkpoint when its folder is quiet, and what makes it do so at once."""
        self._follows_programs = False
        """Whether a program saves in folders of its own. The same on all ranks."""
        self._announced: Publication | None = None
        """The last checkpoint that the program may still change."""
        self._resumed: Path | None = None
        """What training resumed from: its state may name it as the best one."""

    @classmethod
    def current(cls) -> "FrameworkRun":
        """Return this process's run. The first call makes it, as does the first after `close` or `leave`.

        Raises UsageError or VolumeError when it makes one.
        """
        if cls._current is None:
            cls._current = cls()
        return cls._current

    @classmethod
    def for_training(cls, *outputs: str | Path) -> "FrameworkRun | None":
        """Return the run of a training that begins now, of these output directories; None if it is refused.

        It is if another training is under way in this process, or one has ended there in this start: this one would
        resume from the other one's checkpoints. Call `ended` when it has ended by itself. Raises UsageError or
        VolumeError.
        """
        if cls._in_training:
            warn("this training is not protected: another one is under way in this process")
            return None
        run = cls.current()
        origins = run._origins(outputs)
        if run._is_first_of(origins):
            run._session.note_training(origins, ended=False)
            cls._in_training = True
            cls._trained |= set(origins)
            return run
        run.close()
        warn(
            "this training is not protected: another one saves in its output directory, or has ended there, and the "
            "checkpoints there are that one's; hint: give each training an output directory of its own"
        )
        return None

    def _is_first_of(self, origins: Mapping[str, Path]) -> bool:
        def agree() -> bool | None:
            context, own = self._session.context(), set(origins)
            is_first = own.isdisjoint(FrameworkRun._trained)
            if context.leads_pod:
                is_first &= not any(is_taken(context.local.records, one, origin) for one, origin in origins.items())
            return context.coordinator.agree(f"first/{self._session.next_number()}", is_first)

        return self._unless_given_up(agree, otherwise=None) is not False

    def require_only_training(self, *, resumes: bool) -> None:
        """Let a training without an output directory begin, which resumes from whatever the run has saved.

        `resumes`: there is something. Raises UsageError if another program, or an earlier training of this process, has
        begun one in this start.
        """
        origins = self._origins(())
        if resumes and not self._is_first_of(origins):
            raise UsageError(
                ErrorKind.BAD_ARGUMENT,
                "another training of this run names no output directory either, and this one would resume from its "
                "checkpoints",
                hint="give each training a directory of its own, with automatic_checkpoint_naming, or a path to load",
            )
        FrameworkRun._trained |= set(origins)
        # Nothing tells when it has ended.
        self.ended()

    def ended(self, *outputs: str | Path) -> None:
        """Note that the training of these output directories has ended by itself: no other one resumes from it."""
        self._session.note_training(self._origins(outputs), ended=True)

    def _origins(self, outputs: Sequence[str | Path]) -> Mapping[str, Path]:
        """Return where these output directories are, by what records call them."""
        return dict(zip(self._own(outputs), map(Path, outputs or [self.checkpoint_directory]), strict=True))

    def _own(self, outputs: Sequence[str | Path]) -> Sequence[str]:
        """Return what records call these output directories; the checkpoint directory if there are none."""
        return [self.directories.recorded(output) for output in outputs or [self.checkpoint_directory]]

    @property
    def stopping(self) -> bool:
        """Whether the pod is ending and the just-in-time checkpoint is saved: leave then."""
        return self._session.stopping

    @property
    def checkpoint_directory(self) -> Path:
        """Where to write a checkpoint if the program names no directory."""
        return self._session.settings.checkpoint_directory

    def hold_sigterm(self) -> None:
        """Install the SIGTERM handler again after a framework has installed its own."""
        self._session.hold_sigterm()

    def action_at(self, step: int, tick: int = 0) -> Action:
        """Return what to do after `step` optimizer steps and `tick` batches of an evaluation: the same on all ranks.

        Positions must grow, and be the same on all ranks. After a termination notice the answer is SAVE_AND_EXIT until
        the just-in-time checkpoint is saved, and NOTHING from then on.
        """
        if self._session.stopping:
            return Action.NOTHING
        action = self._unless_given_up(lambda: self._session.action_at(step, tick), otherwise=Action.NOTHING)
        self._exit_asked |= action is Action.SAVE_AND_EXIT
        return action

    def begins_at(self, step: int) -> None:
        """Note that training begins, or goes on, with the state of this step, which the program has loaded."""
        self._session.note_stored(step)

    def save_unasked(self, step: int, save: Callable[[], object]) -> None:
        """Have `save` save and announce a checkpoint that the program does not know of; just in time once more if lost.

        An error costs the checkpoint alone, and is said.
        """
        while True:  # ends: after the second loss the session stops
            losses = self._session.just_in_time_losses
            try:
                save()
            except Exception as error:
                _log.warning("checkpoint lost: step=%d error=%s", step, reason(error))
            if self._session.just_in_time_losses == losses:
                return
            if not self._session.all_came_out():
                self.leave(together=False)
            if self._session.stopping:
                return

    def admits(self, step: int) -> bool:
        """Return whether the agents have room for the periodic checkpoint that is due at `step`."""

        def admit() -> bool:
            self._abort_pending()
            self._pending = self._session.admit(step, self._kind(None))
            return self._pending is not None

        return self._unless_given_up(admit, otherwise=True)

    def claimed(self, path: Path) -> AbstractContextManager[None]:
        """Claim a checkpoint while it is written: the agent's directory watch might take it for complete too early."""
        return nullcontext() if self._given_up else self._session.claimed(path)

    def announce_written(self, path: Path, step: int, kind: Kind | None = None) -> bool:
        """Announce the checkpoint `path`, which was written there without `save`. Waits until all ranks have it.

        `kind`: None for a periodic one. A save that a termination notice asked for is always just-in-time. Returns
        whether all ranks have announced it.
        """
        self._announce_waiting()
        self._announced = None
        is_stored = self.directories.protects(path, may_link=False)
        pending = self._begin(path, step, kind, waiting=False) if is_stored else None
        if pending is None:
            return False
        with self.claimed(path):
            return self._publication(pending, path).announce(pending.kind)

    def announce_when(self, future: "Future[Any]", path: Path, step: int, kind: Kind | None = None) -> None:
        """Announce the checkpoint from another thread once `future` is done. If it fails, announce nothing."""
        self._follows_programs = True
        self._announce_waiting()
        is_stored = self.directories.protects(path, may_link=False)
        pending = self._begin(path, step, kind, waiting=False) if is_stored else None
        if pending is None:
            return

        self._announced = publication = self._publication(pending, path)
        claim = ExitStack()
        claim.enter_context(self.claimed(path))

        def announce(failure: BaseException | None) -> None:
            if failure is not None:
                _log.warning("checkpoint not announced, it could not be written: path=%s error=%s", path, failure)
            with claim:
                if failure is None:
                    publication.announce(pending.kind)
                else:
                    publication.withdraw()

        self._close_at_exit()
        self._writes.follow(future, announce)

    def save(
        self,
        path: Path,
        step: int,
        write: Callable[[Path], object],
        *,
        asynchronous: bool,
        elsewhere: bool = True,
        recorded: bool = True,
        program_folder: bool = False,
        program_files_of: Path | None = None,
    ) -> bool:
        """Have `write` save this rank's part of `path` elsewhere, and move it to `path` when all ranks have theirs.

        A process that is killed meanwhile leaves nothing that its framework or program would take for a checkpoint.
        What has no place elsewhere is written to `path` at once. Call `announce` or `leave_unannounced` next.

        Args:
            path: Where the checkpoint belongs.
            step: Optimizer steps that are done.
            write: Saves to the path that it gets.
            asynchronous: Wait for a copy of what `write` saves, which is written and moved behind the training. A
                just-in-time save never is: nothing goes on that could change the state.
            elsewhere: Whether `write` can save to another path.
            recorded: Whether training may resume from it. If not, the agent takes it for a file of the program's.
            program_folder: The folder is the program's own, which may add files to what it has saved, or rename it. If
                training waits for the save, it is announced at the program's next save, at the end of training, or when
                no file was added there for 2 s, whichever comes first.
            program_files_of: The checkpoint before, for a save that the program does not know of: what it put into the
                folder of that one is taken along.

        Returns:
            False if it is lost. True if it is in place, or is being written behind the training.

        Raises:
            OSError: This rank could not move it.
            Exception: What `write` raises. The other ranks are told.
        """
        self._follows_programs |= program_folder
        self._announce_waiting()
        # Whatever becomes of this save, all ranks follow the same checkpoint from here on.
        before, self._announced = self._announced, None
        behind = asynchronous and not self._exit_asked
        if self._exit_asked:
            self._unless_given_up(lambda: self._session.make_time(self._writer), otherwise=None)
        same_state = behind and step == self._copied_step and self._written_from_copy < _MOST_FROM_ONE_COPY
        if not same_state:
            self.wait()
        outside = None if self.directories.holds(path) else path
        if outside is not None:
            self._prepare_outside(outside)
        with ExitStack() as claim:
            pending = self._begin(path, step, None)
            if recorded and pending is not None:
                claim.enter_context(self.claimed(path))
            path = path if outside is None else self.directories.in_volume(path.parent) / path.name
            publication = None if pending is None else self._publication(pending, path)
            self._saved = self._last = saved = UnannouncedSave(
                path=path,
                outside=outside,
                publication=publication,
                claim=claim,
                may_change=program_folder and not behind and outside is None,
            )
            if outside is not None:
                self.wait()
                self._write(saved, write, outside)
            elif publication is None or pending is None or not elsewhere or not publication.begin():
                self.wait()
                self._write(saved, write, path)
                saved.in_place = True
            elif behind:
                self._save_behind(saved, publication, write, same_state=same_state, recorded=recorded)
                self._copied_step = step
                self._session.goes_on(pending)
            else:
                self._write(saved, write, publication.written)
                if before is not None and before.saved_path == program_files_of:
                    # It may have been renamed.
                    program_files_of = before.path
                saved.in_place = publication.place(recorded=recorded, program_files_of=program_files_of)
                if publication.failure is not None:
                    if not self._exit_asked:
                        # The program hears of it. Of a just-in-time save it does not: the next start tries again.
                        publication.discard()
                    raise publication.failure
            saved.claim = claim.pop_all()
            return saved.in_place or saved.behind is not None or saved.outside is not None

    def _prepare_outside(self, path: Path) -> None:
        """Agree with the other ranks on whether it will be linked, and let what is stored of `path` be written anew."""
        coordinator, number = self._session.context().coordinator, self._session.next_number()

        def agree() -> bool:
            links = self.directories.links(path)
            try:
                if links and self._session.context().leads_pod:
                    break_links(path, self.directories.in_volume(path.parent) / path.name)
            except OSError as error:
                links = False
                _log.warning("checkpoints are not linked any more: path=%s error=%s", path, error)
            return bool(coordinator.agree(f"links/{number}", links))

        self.directories.linkable = self._unless_given_up(agree, otherwise=False)

    @property
    def last_is_in_volume(self) -> bool:
        """Whether what was saved last lies in the volume, or is on its way there; true if nothing was saved."""
        return (last := self._last) is None or last.in_place or last.behind is not None

    def _link(self, saved: UnannouncedSave) -> bool:
        """Link what was written outside the volume into it; return whether it is there on all ranks."""
        publication = saved.publication
        if publication is None or saved.outside is None or not publication.begin():
            return False
        linked = True
        try:
            # In another pod there may be no part of it.
            if self._session.context().leads_pod and os.path.lexists(saved.outside):
                link_tree(saved.outside, publication.written)
        except OSError as error:
            linked = False
            _log.warning("checkpoint not stored, it cannot be linked: path=%s error=%s", saved.outside, error)
        # All ranks agree on this.
        self.directories.linkable = publication.place(written=linked)
        return self.directories.linkable

    def _publication(self, pending: PendingSave, path: Path) -> Publication:
        return Publication(self._session, pending, path, output=self.directories.output_of(path))

    def _save_behind(
        self,
        saved: UnannouncedSave,
        publication: Publication,
        write: Callable[[Path], object],
        *,
        same_state: bool,
        recorded: bool,
    ) -> None:
        """As `save`. A second checkpoint of one step shares the copy of the first, as far as that is still the same."""
        saved.behind = self._writer.begin(publication.folder, same_state=same_state)
        self._written_from_copy = self._written_from_copy + 1 if same_state else 1
        with handing_in(saved.behind):
            self._write(saved, write, publication.written)

        def place(failure: BaseException | None) -> None:
            if failure is not None:
                _log.warning("checkpoint lost, training goes on: path=%s error=%r", saved.path, failure)
            saved.in_place = publication.place(written=failure is None, recorded=recorded)
            self._behind.discard(saved.path)

        self._behind.add(saved.path)
        saved.behind.then(place)

    def _write(self, saved: UnannouncedSave, write: Callable[[Path], object], path: Path) -> None:
        try:
            write(path)
        except BaseException:
            self._saved, publication = None, saved.publication
            if publication is not None and path == publication.written:
                publication.place(written=False)
            elif publication is not None:
                publication.withdraw()
            raise

    def announce(self, kind: Kind | None = None, *, then: Callable[[bool], object] = lambda _: None) -> None:
        """Announce what `save` saved, once it is in place; without waiting if it was asynchronous.

        `kind` as for `announce_written`. `then`: called after that, perhaps in another thread, with whether it was
        announced; not if it is lost.
        """
        saved = self._saved
        if saved is None or not saved.may_change or not saved.in_place or self._exit_asked:
            self._announce(self._kind(kind), then)
        else:
            self._saved = None
            self._announce_later(saved, self._kind(kind), then)

    def leave_unannounced(self) -> None:
        """Do not announce what `save` saved. It gets its place all the same."""
        self._announce(None, lambda _: None)

    def _announce(self, kind: Kind | None, then: Callable[[bool], object]) -> None:
        saved, self._saved = self._saved, None
        if saved is None:
            return

        def announce(_: BaseException | None) -> None:
            publication = saved.publication
            with saved.claim:
                if saved.outside is not None and kind is not None:
                    saved.in_place, context = self._link(saved), self._session.context()
                    if saved.in_place and context.leads_pod:
                        context.local.drop_older_links(saved.path, saved.outside.parent, spared=self._resumed)
                if not saved.in_place:
                    return
                if publication is not None and kind is None:
                    publication.withdraw()
                then(publication is not None and kind is not None and publication.announce(kind))
                if publication is not None:
                    publication.forget_deleted()

        if saved.behind is None:
            announce(None)
        else:
            saved.behind.then(announce)

    def _announce_later(self, saved: UnannouncedSave, kind: Kind, then: Callable[[bool], object]) -> None:
        publication = saved.publication
        if publication is None:
            saved.claim.close()
            return
        publication.goes_on()
        wait_no_more = threading.Event()

        def announce() -> None:
            wait_until_quiet(saved.path, wait_no_more)
            with saved.claim:
                then(publication.announce(kind))
                publication.forget_deleted()

        thread = threading.Thread(target=announce, name="keepstep-announce", daemon=True)
        self._waiting = thread, wait_no_more
        self._announced = publication
        self._close_at_exit()
        thread.start()

    def _close_at_exit(self) -> None:
        # A thread inside the store's C++ when the interpreter ends would abort the process.
        atexit.unregister(self.close)
        atexit.register(self.close, ended=False)

    @classmethod
    def announce_before_ranks_part(cls) -> None:
        """Announce what waits for its folder to be quiet, before the program ends what the ranks agree by."""
        if cls._current is not None:
            cls._current._announce_waiting()

    def _announce_waiting(self, *, seconds: float = PATIENCE_SECONDS) -> None:
        """Announce what still waits for its folder to be quiet, and once more what was changed after it was announced.

        `seconds`: how long to wait for ranks that may be gone.
        """
        if self._waiting is not None:
            thread, wait_no_more = self._waiting
            wait_no_more.set()
            thread.join(seconds)
            self._waiting = None
        if not self._follows_programs:
            return
        announced = self._announced
        # On all ranks, also where a save has failed: the number is part of the ids of later saves.
        key = f"unchanged/{self._session.next_number()}"
        is_unchanged = announced is None or not announced.was_changed()

        def agree() -> bool | None:
            return self._session.context().coordinator.agree(key, is_unchanged, seconds=seconds)

        if self._unless_given_up(agree, otherwise=None) is False and announced is not None:
            pending = self._session.begin(announced.step, Kind.PERIODIC, waiting=False)
            self._announced = announced.again(pending)
            self._announced.announce(Kind.PERIODIC)

    def is_asynchronous(self, *, by_default: bool) -> bool:
        """Whether saves are asynchronous: as the program or its environment says, else `by_default`."""
        asked = FrameworkRun.asynchronous_by_program
        asked = self._session.settings.asynchronous if asked is None else asked
        return by_default if asked is None else asked

    def expect_saves(self, model: Any = None) -> None:
        """Prepare for asynchronous saves, before training, in a rank that will have the training's state to write.

        `model`: a torch module that is saved beside what the optimizers train, where they train copies of it.
        """
        self._writer.expect(model)

    def when_saved(self, work: Callable[[], object]) -> None:
        """Call `work` when what was saved last is announced, perhaps in another thread; not if it is lost."""
        last = self._last
        if last is None or (last.behind is None and (last.in_place or last.outside is not None)):
            work()
        elif last.behind is not None:
            last.behind.then(lambda _: work() if last.in_place else None)

    def wait_for(self, path: Path) -> None:
        """Wait until `path` is in place, if it is being written."""
        if path in self._behind:
            self.wait()

    def wait(self) -> None:
        """Wait until what was saved last is in place, and announced as far as it is to be."""
        self._writer.wait()

    def same(self, step: int, value: object) -> bool:
        """Return whether `value` is the same on all ranks, such as how many batches an evaluation after `step` has."""
        key = f"same/{step}/{self._session.next_number()}"
        return self._unless_given_up(lambda: self._session.context().coordinator.same(key, str(value)), otherwise=False)

    def gather(self, step: int, value: str) -> Sequence[str] | None:
        """Return the values of all ranks, by rank, on rank 0; None on other ranks, and when some do not come.

        Not a collective, because a rank whose volume failed is not protected and would take no part in it.
        """
        key = f"gather/{step}/{self._session.next_number()}"
        return self._unless_given_up(lambda: self._session.context().coordinator.gather(key, value), otherwise=None)

    def recorded_step(self, path: Path) -> int | None:
        """Return the step of a checkpoint that Keepstep recorded or restored; None for any other."""
        local = self._session.context().local
        places = {path.resolve(), (self.directories.in_volume(path.parent) / path.name).resolve()}
        found = (one for one in read_records(local.records) if local.place(one).resolve() in places)
        return next((record.step for record in found), None)

    def newest(self, *outputs: str | Path) -> Path | None:
        """Return the checkpoint to resume from, the same on all ranks; None to start from step 0.

        `outputs`: the training's own output directories; none: the newest of the run, whoever saved it. Raises
        SystemExit when the pod is ending, and when the ranks cannot choose a checkpoint.
        """
        chosen = self._chosen(lambda: self._resumption(outputs).choose())
        self._resumed = None if chosen is None else self._session.context().local.place(chosen)
        return self._resumed

    def newest_or(self, found: Path | None, step: int, *outputs: str | Path) -> Path | None:
        """As `newest`, where the framework may find a checkpoint of that step by itself; it is taken if it is newer."""
        self._resumed = self._chosen(lambda: self._resumption(outputs).choose_or(found, step))
        return self._resumed

    def newest_files(
        self, needed: Callable[[Sequence[str], Sequence[int]], Sequence[str]], *outputs: str | Path
    ) -> SomeFiles | None:
        """As `newest`, for a framework whose ranks read files of their own.

        `needed` gets the paths of all files, and this pod's ranks; it returns those to bring, or none for all.
        """

        def choose_some() -> SomeFiles | Record | None:
            ranks = self._session.context().coordinator.ranks
            return self._resumption(outputs).choose_files(lambda files: needed(files, ranks.pod or (ranks.rank,)))

        chosen = self._chosen(choose_some)
        if not isinstance(chosen, Record):
            return chosen
        place = self._session.context().local.place(chosen)
        return SomeFiles(place=place, directory=place, files=())

    def bring(self, path: Path, output: str | Path) -> None:
        """Have a checkpoint there that a restored state refers to, such as the best one, and say if it cannot be had.

        All ranks call this with the same path. `output`: its output directory.
        """
        path = path.absolute()
        is_here = self._unless_given_up(lambda: self.same(0, path.exists()), otherwise=True)
        if path.exists() and is_here:
            return
        place = path if self.directories.holds(path) else self.directories.in_volume(output) / path.name
        brought = self._unless_given_up(lambda: self._resumption([output]).bring(place), otherwise=False)
        try:
            if brought and place != path and self._session.context().leads_pod and not path.exists():
                put_beside(place, path)
        except OSError as error:
            _log.warning("not put back: path=%s error=%s", path, error)
            brought = False
        if self._unless_given_up(lambda: self.same(0, brought), otherwise=False) and brought:
            return
        warn(f"the state that training resumes from refers to {path}, which cannot be had")

    def _resumption(self, outputs: Sequence[str | Path]) -> Resumption:
        return Resumption(self._session, self._own(outputs) if outputs else None)

    def _chosen(self, ask_ranks: Callable[[], _Result]) -> _Result:
        try:
            if self._session.ends_untrained():
                self.leave()
            chosen = ask_ranks()
        except KeepstepError as error:
            # Training from step 0 over what was saved would be worse than stopping.
            raise SystemExit(f"keepstep: {error}; {error.hint}") from error
        return chosen

    def leave(self, *, together: bool = True) -> NoReturn:
        """Wait for running writes, and for the ranks if they leave `together`, then leave as the session does."""
        self._given_up |= not together
        self._shut()
        self._session.leave(together=together)

    def close(self, *, ended: bool = True) -> None:
        """End a run without leaving: wait for running writes, stop handling SIGTERM. Idempotent.

        `ended`: the training has; else an error ended it, or the process does.
        """
        self._shut()
        self._session.close(ended=ended)

    def _shut(self) -> None:
        self.leave_unannounced()
        self._writer.close()
        self._announce_waiting(seconds=_END_SECONDS)
        self._announced = None
        self._writes.wait()
        self._abort_pending()
        atexit.unregister(self.close)
        if FrameworkRun._current is self:
            FrameworkRun._current = None
            FrameworkRun._in_training = False

    def _begin(self, path: Path, step: int, kind: Kind | None, *, waiting: bool = True) -> PendingSave | None:
        """Return the save that a checkpoint belongs to; None when it cannot be announced.

        `waiting`: it begins now. If not, nothing told of its beginning, and nobody knows how long training waited.
        """
        is_protected = not self._given_up and self.directories.protects(path)
        if not is_protected or (self._pending is not None and self._pending.step != step):
            self._abort_pending()
        pending, self._pending = self._pending, None
        if is_protected and pending is None:
            pending = self._unless_given_up(
                lambda: self._session.begin(step, self._kind(kind), waiting=waiting), otherwise=None
            )
        return replace(pending, kind=self._kind(kind)) if pending is not None and pending.together else None

    def _abort_pending(self) -> None:
        if self._pending is not None:
            self._session.abort(self._pending)
            self._pending = None

    def _kind(self, kind: Kind | None) -> Kind:
        if self._exit_asked:
            return Kind.JUST_IN_TIME
        return kind or Kind.PERIODIC

    def _unless_given_up(self, work: Callable[[], _Result], *, otherwise: _Result) -> _Result:
        """Return what `work` returns. If it raises a KeepstepError, nothing is protected from then on: `otherwise`."""
        if self._given_up:
            return otherwise
        try:
            return work()
        except KeepstepError as error:
            self._given_up = True
            _log.warning("not protected: error=%s hint=%s", error, error.hint)
            self._session.close(ended=False)
            return otherwise
