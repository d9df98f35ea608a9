"""The callback that protects one training, and its wrappers around a few of the Trainer's methods.

Owns when a Lightning training saves, leaves and resumes. Must not know what is in a checkpoint. All ranks pass the same
places here, so they ask at the same positions.
"""

import functools
import inspect
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from keepstep.autoload.post_import import reason, warn
from keepstep.errors import KeepstepError
from keepstep.framework_run import FrameworkRun
from keepstep.gate import Action
from keepstep.integrations.lightning import checkpoint as contents
from keepstep.integrations.lightning import directory
from keepstep.integrations.ownership import Owner, owns
from keepstep_api import names

_log: Final = logging.getLogger("keepstep")
_OWN: Final = "keepstep-step="
"""Prefix of the names of our own checkpoints. No ModelCheckpoint makes such a name."""


class Protection:
    """The callback without its base class, which is Lightning's. It can be pickled until its training begins."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._armed = False
        self._resumes = False
        self._run: FrameworkRun | None = None
        self._undo: list[Callable[[], object]] = []
        self._training = False
        self._just_in_time = True
        self._position = (-1, 0)
        self._steps_done = -1
        self._exit_asked = False
        self._leaving = False
        self._visiting = False
        self._by_callback = False
        self._announced_step = -1
        self._resumed_name = ""
        self._random_states: dict[str, Any] | None = None
        """The states of the checkpoint that training resumes from."""
        self._at_epoch: dict[str, Any] = {}
        """The states before the iterators of this epoch were made, which draw its order of the data from them."""
        self._before_validation: dict[str, Any] = {}
        self._validates_evenly = False
        self._directory: Path | None = None
        """Where the ModelCheckpoints write that have no directory of their own."""
        self._moved: list[Any] = []
        self._numbered = False
        """Whether a logger numbers the folder of the checkpoints anew at each start."""
        self._outputs: list[Path] = []
        """The output directories of this training, one for each ModelCheckpoint."""

    def __reduce__(self) -> tuple[Any, ...]:
        return make_protection, (self._package,), self.__dict__

    def choose_directory(self, trainer: Any) -> None:
        """Let the checkpoints of a new Trainer, whose program names no directory, be written where they are stored."""
        self._directory = directory.directory_for(trainer)
        self._numbered = directory.has_numbered_versions(trainer)
        self._put_into_directory(trainer)

    def _leave_directory(self) -> None:
        """Undo `choose_directory`, where a training is not protected: its files would mix with another one's."""
        for callback in self._moved:
            callback.dirpath = None
        self._directory, self._moved = None, []

    def arm(self, trainer: Any, *, resumes: bool) -> None:
        """Protect the next fit. `resumes`: the program names no checkpoint to begin from, or asks for the last one."""
        self._armed, self._resumes = True, resumes
        self._put_into_directory(trainer)
        # In their `setup`, which comes before this one's.
        directory.mark_undecided(trainer)

    def end(self, *, ended: bool) -> None:
        """End the protection after the fit, which has `ended` by itself or not.

        Raises SystemExit after a just-in-time save.
        """
        self._armed = self._training = False
        # The callbacks keep it, as they keep what Lightning chooses: the program may ask for its best checkpoint.
        self._directory, self._moved = None, []
        while self._undo:
            self._undo.pop()()
        run, self._run = self._run, None
        if run is not None and (self._leaving or run.stopping):
            run.leave()
        elif run is not None:
            run.close(ended=ended)

    # Lightning's hooks, in the order of a training.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        # By this hook the process group exists, and this is the process that trains.
        if stage != "fit" or not self._armed:
            return
        # Those of the model's `configure_callbacks`: Lightning puts them last, so they are set up after this.
        self._put_into_directory(trainer)
        # After the ModelCheckpoints: a step that one of them has just saved need not be saved again.
        trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self] + [self]
        try:
            self._begin(trainer)
        except (AttributeError, KeyError, TypeError, KeepstepError) as error:
            warn(f"{type(trainer).__qualname__} is not protected: {reason(error)}")
        if self._run is None:
            self._leave_directory()
        elif self._moved and trainer.is_global_zero:
            _log.info("the program names no directory for its checkpoints: they go to %s", self._directory)

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        # Not earlier: a LearningRateFinder trains for trial, and saves, before this hook.
        self._training = self._run is not None
        self._steps_done = trainer.global_step
        if self._run is not None and self._resumed_name:
            self._run.begins_at(trainer.global_step)
        if self._training:
            contents.leave_step_saved(trainer)
        if self._training and self._run is not None and self._resumed_name:
            self._bring_best(trainer, self._run)
        if self._training and self._random_states is not None:
            # The loaders' iterators exist, and making them has drawn from the generators.
            if self._resumes:
                contents.skip_batches(trainer)
            contents.restore_random_states(trainer, self._random_states)

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        self._leave_in_time()
        if trainer.current_epoch:
            self._at_epoch = contents.capture_random_states(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._leave_in_time()
        if trainer.global_step > self._steps_done:
            self._steps_done = trainer.global_step
            self._visit(trainer)

    def on_validation_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        # Half-accumulated gradients are in no checkpoint.
        if self._training and self._validates_evenly and not contents.is_accumulating(trainer):
            self._visit(trainer)

    def on_validation_end(self, *_: Any) -> None:
        self._leave_in_time()

    def on_train_end(self, *_: Any) -> None:
        if self._run is not None:
            # What comes next may look at checkpoints.
            self._run.wait()
        self._leave_in_time()

    def on_fit_end(self, *_: Any) -> None:
        if self._run is not None and not self._leaving:
            self._run.ended(*self._outputs)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        # After an exception a rank may be alone here.
        if not self._training or self._run is None or trainer.interrupted:
            return
        contents.owe_what_follows(trainer, checkpoint)
        # A validation that is under way will run again from its start.
        own = self._before_validation if contents.is_validating(trainer) else contents.capture_random_states(trainer)
        contents.keep_random_states(trainer, self._run, checkpoint, {"now": own, "at_epoch": self._at_epoch})

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        states = contents.random_states(trainer, checkpoint)
        if states is not None:
            self._random_states, self._at_epoch = states["now"], states["at_epoch"]
        contents.say_what_is_not_resumed(self._package, checkpoint)

    def _put_into_directory(self, trainer: Any) -> None:
        if self._directory is not None:
            self._moved += directory.put_into(self._directory, trainer)

    def _begin(self, trainer: Any) -> None:
        contents.look_for_what_is_used(trainer)
        self._undo += [functools.partial(os.environ.pop, name, None) for name in _complete_environment(trainer)]
        methods: list[tuple[Any, str, Callable[..., Any]]] = [
            (trainer, "save_checkpoint", self._save_checkpoint),
            (trainer._checkpoint_connector, "resume_start", self._resume_start),
            (trainer.fit_loop.epoch_loop.val_loop, "run", self._validate),
            (trainer.fit_loop, "_load_combined_loader_states", self._load_loaders),
            (trainer.strategy, "remove_checkpoint", self._remove_checkpoint),
            *((one, "file_exists", self._file_exists) for one in trainer.callbacks if hasattr(one, "file_exists")),
            *((one, "_link_checkpoint", self._link) for one in trainer.callbacks if hasattr(one, "_link_checkpoint")),
            *((one, "_save_checkpoint", self._save) for one in trainer.callbacks if hasattr(one, "_save_checkpoint")),
        ]
        self._just_in_time = not _requeues(trainer)
        if self._just_in_time:
            methods.append((trainer._signal_connector, "register_signal_handlers", self._register_signal_handlers))
        else:
            warn(f"{type(trainer).__qualname__} is not saved just in time: SLURM's auto-requeue has the signals")
        originals = [getattr(owner, name) for owner, name, _ in methods]
        self._outputs = directory.outputs_of(trainer, numbered=self._numbered)
        self._run = FrameworkRun.for_training(*self._outputs)
        if self._run is None:
            return
        if trainer.is_global_zero and self._run.is_asynchronous(by_default=contents.nobody_looks(trainer)):
            self._run.expect_saves()
        for (owner, name, ours), original in zip(methods, originals, strict=True):
            setattr(owner, name, functools.update_wrapper(functools.partial(ours, trainer, original), original))
            self._undo.append(functools.partial(vars(owner).pop, name, None))

    def _resume_start(self, trainer: Any, resume: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        call = inspect.signature(resume).bind(*arguments, **keywords)
        chosen = call.arguments.get("checkpoint_path")
        if self._run is not None:
            self._file_versions(trainer, self._run)
        if self._run is not None and self._resumes and owns(Owner.TRAINER):
            chosen = call.arguments["checkpoint_path"] = self._newest(trainer, self._run, chosen)
        self._resumed_name = Path(chosen or "").name
        resume(*call.args, **call.kwargs)

    def _newest(self, trainer: Any, run: FrameworkRun, last: Any) -> str | None:
        """Return what to resume from. `last`: the last checkpoint that Lightning found, if the program asked for it."""
        found = Path(last) if last else None
        step = contents.step_of(trainer, last) if found and not run.directories.holds(found.absolute()) else -1
        newest = run.newest_or(found, step, *(self._outputs or [run.checkpoint_directory]))
        return None if newest is None else str(newest)

    def _file_versions(self, trainer: Any, run: FrameworkRun) -> None:
        """Let what is saved in this start's version belong to the directory that has the versions of all starts."""
        for callback, output in zip(directory.model_checkpoints(trainer), self._outputs, strict=False):
            chosen = getattr(callback, "dirpath", None)
            if chosen and "://" not in str(chosen):
                run.directories.file_under(Path(chosen), output)

    def _bring_best(self, trainer: Any, run: FrameworkRun) -> None:
        """Have the best checkpoints there that each ModelCheckpoint knows: on a new machine only the newest is."""
        for callback, output in zip(directory.model_checkpoints(trainer), self._outputs, strict=False):
            kept = callback.best_k_models if callback.save_top_k > 0 else {}
            for path in dict.fromkeys(filter(None, (callback.best_model_path, *kept))):
                run.bring(Path(path), output)

    def _load_loaders(self, trainer: Any, load: Callable[[], None]) -> None:
        if self._random_states is not None and self._resumes and not self._training:
            # The epoch that is resumed has its data in the order that it began with.
            contents.begin_workers(trainer)
            contents.restore_random_states(trainer, self._at_epoch)
        elif not trainer.current_epoch:
            self._at_epoch = contents.capture_random_states(trainer)
        load()
        # Lightning does this only after the first iterator is made, which is too late.
        contents.tell_samplers_epoch(trainer)

    def _validate(self, trainer: Any, run: Callable[[], Any]) -> Any:
        self._before_validation = contents.capture_random_states(trainer)
        if self._training and self._run is not None and owns(Owner.TRAINER):
            # Ranks that validate different numbers of batches would ask at different positions.
            trainer.fit_loop.epoch_loop.val_loop.setup_data()
            self._validates_evenly = self._run.same(trainer.global_step, trainer.num_val_batches)
        return run()

    def _register_signal_handlers(self, _: Any, register: Callable[[], None]) -> None:
        register()
        # Lightning's handler broadcasts, and hangs when only one rank is signalled.
        if self._run is not None:
            self._run.hold_sigterm()

    def _save_checkpoint(self, trainer: Any, save: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        call = inspect.signature(save).bind(*arguments, **keywords)
        place = str(call.arguments["filepath"])
        ours = self._training and not self._leaving and not call.arguments.get("weights_only") and "://" not in place
        if not ours or self._run is None or not owns(Owner.TRAINER):
            save(*arguments, **keywords)
            return
        path = Path(place).absolute()
        if contents.can_be_elsewhere(trainer):
            self._save_aside(self._run, trainer, functools.partial(_save_to, save, call), path)
        else:
            # The agent leaves out of snapshots what was claimed, and a copy is not announced either.
            with nullcontext() if trainer.global_step == self._announced_step else self._run.claimed(path):
                self._save_ours(trainer, functools.partial(save, *arguments, **keywords), path)

    def _save_aside(self, run: FrameworkRun, trainer: Any, save: Callable[[Path], None], path: Path) -> None:
        def write(place: Path) -> None:
            try:
                with contents.handing_in(trainer):
                    save(place)
            except OSError:
                if self._visiting:
                    # The other ranks wait in it.
                    trainer.strategy.barrier()
                raise

        is_copy = self._is_copy(trainer)
        asynchronous = run.is_asynchronous(by_default=self._by_callback and contents.nobody_looks(trainer))
        try:
            run.save(path, trainer.global_step, write, asynchronous=asynchronous, recorded=not is_copy)
        except OSError as error:
            if not self._visiting:
                raise
            # The program did not ask for this save, and training continues without it.
            _log.warning("checkpoint lost: path=%s error=%s", path, error)
        self._ask_after_save(trainer)
        if is_copy and not self._exit_asked:
            run.leave_unannounced()
        else:
            run.announce(contents.kind(trainer), then=lambda told: _remove_own(trainer, path) if told else None)
        self._leaving = self._exit_asked and run.last_is_in_volume

    def _save_ours(self, trainer: Any, save: Callable[[], None], path: Path) -> None:
        failure: OSError | None = None
        try:
            save()
        except OSError as error:
            if not self._visiting:
                raise
            # The program did not ask for this save, and training continues without it.
            failure = error
            trainer.strategy.barrier()
        # `save` ends in a barrier: the checkpoint is complete, or an AsyncCheckpointIO is writing it.
        self._ask_after_save(trainer)
        if not self._is_copy(trainer):
            self._announce(trainer, path, failure)
        self._leaving = self._exit_asked and self._run is not None and self._run.directories.holds(path)

    def _ask_after_save(self, trainer: Any) -> None:
        """A notice that came during a save needs no second one."""
        if not contents.is_accumulating(trainer):
            self._ask(trainer)

    def _is_copy(self, trainer: Any) -> bool:
        """Whether this step is announced already, so that this is a second copy of its state, such as `last.ckpt`."""
        step = trainer.global_step
        is_copy = step == self._announced_step and not self._exit_asked
        self._announced_step = step
        return is_copy

    def _visit(self, trainer: Any) -> None:
        """Ask, at a place where the state can be saved, and save and leave if asked to."""
        if not self._training or self._ask(trainer) is Action.NOTHING:
            return
        name = f"{_OWN}{trainer.global_step}.ckpt"
        if name == self._resumed_name:
            # Stopped again before the next step: the checkpoint that it resumed from must not be overwritten.
            name = f"{_OWN}{trainer.global_step}-v1.ckpt"
        self._visiting = True
        save = functools.partial(trainer.save_checkpoint, self._own_directory(trainer) / name)
        if self._run is not None:
            self._run.save_unasked(trainer.global_step, save)
        self._visiting = False
        # If it is lost, all ranks leave all the same: the checkpoint before this one is there.
        self._leaving |= self._exit_asked
        self._leave_in_time()

    def _leave_in_time(self) -> None:
        if self._training and self._leaving:
            # Lightning tears down and raises it again; `end` then leaves with the others, and the code that is true.
            raise SystemExit(names.JUST_IN_TIME_EXIT_CODE)

    def _ask(self, trainer: Any) -> Action:
        if self._run is None or not self._just_in_time or not owns(Owner.TRAINER):
            return Action.NOTHING
        step, tick = self._position
        self._position = (step, tick + 1) if step == trainer.global_step else (trainer.global_step, 0)
        action = self._run.action_at(*self._position)
        self._exit_asked |= action is Action.SAVE_AND_EXIT
        return action

    def _announce(self, trainer: Any, path: Path, failure: OSError | None) -> None:
        assert self._run is not None
        kind, written = contents.kind(trainer), contents.written(trainer, failure)
        if written is not None:
            self._run.announce_when(written, path, trainer.global_step, kind)
        elif self._run.announce_written(path, trainer.global_step, kind):
            _remove_own(trainer, path)

    def _save(self, _: Any, save: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        """Note that a callback of Lightning's saves: the program's own next line may look at what it has saved."""
        self._by_callback = True
        try:
            save(*arguments, **keywords)
        finally:
            self._by_callback = False

    def _remove_checkpoint(self, _: Any, remove: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        """Lightning removes an older checkpoint when a newer one is saved: not before that is there."""
        assert self._run is not None
        self._run.when_saved(functools.partial(remove, *arguments, **keywords))

    def _link(self, trainer: Any, link: Callable[..., None], _: Any, *paths: str) -> None:
        """Link `last.ckpt` to a checkpoint when that is there: until then the one before it is the last."""
        assert self._run is not None
        self._run.when_saved(functools.partial(link, contents.without_barrier(trainer), *paths))
        trainer.strategy.barrier()

    def _file_exists(self, _: Any, exists: Callable[..., bool], path: Any, *arguments: Any) -> bool:
        if self._run is not None:
            self._run.wait_for(Path(path).absolute())
        return exists(path, *arguments)

    def _own_directory(self, trainer: Any) -> Path:
        """Return the directory of the program's own checkpoints if an agent can take them there, else Keepstep's."""
        assert self._run is not None
        chosen = getattr(trainer.checkpoint_callback, "dirpath", None)
        if chosen and "://" not in str(chosen) and self._run.directories.holds(Path(chosen, _OWN).absolute()):
            return Path(chosen).absolute()
        return self._run.directories.in_volume(self._outputs[0]) if self._outputs else self._run.checkpoint_directory


def make_protection(package: str) -> Protection:
    """Return a callback for `package`: `lightning.pytorch` or `pytorch_lightning`."""
    base = import_module(package).Callback
    made: Protection = type("KeepstepProtection", (Protection, base), {})(package)
    return made


def _complete_environment(trainer: Any) -> Sequence[str]:
    """Set the variables that torchrun sets for a rank, and Lightning's own launcher does not. Returns their names.

    LOCAL_RANK is not one of them: by it Lightning knows whether it must launch, and it is set in the ranks it launched.
    """
    variables = {"WORLD_SIZE": str(trainer.world_size), "LOCAL_WORLD_SIZE": str(trainer.num_devices)}
    if trainer.global_rank > 0:
        variables["RANK"] = str(trainer.global_rank)
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(missing)
    return list(missing)


def _requeues(trainer: Any) -> bool:
    environment = trainer._accelerator_connector.cluster_environment
    is_slurm = any(cls.__name__ == "SLURMEnvironment" for cls in type(environment).__mro__)
    return is_slurm and bool(environment.auto_requeue)


def _save_to(save: Callable[..., None], call: inspect.BoundArguments, path: Path) -> None:
    """Call `save` as the program does, with another path."""
    call.arguments["filepath"] = str(path)
    save(*call.args, **call.kwargs)


def _remove_own(trainer: Any, path: Path) -> None:
    """Remove our own checkpoints before `path`: only the newest is ever read, and nothing else removes the others."""
    if not path.name.startswith(_OWN) or trainer.local_rank != 0:
        return
    for other in path.parent.glob(f"{_OWN}*.ckpt"):
        if other != path and other.is_dir():
            shutil.rmtree(other, ignore_errors=True)
        elif other != path:
            other.unlink(missing_ok=True)
