"""Protects one Trainer: it resumes, its checkpoints are announced, and it stops just in time.

Owns the order in which a Trainer's step ends: log, evaluate, save. A just-in-time save comes before the evaluation
that is due, for which there may be no time; a resumed run makes up for the evaluation. This keeps the random
generators, the learning rate and the choice of the best model those of an uninterrupted run. An evaluation that is due
is recorded where the Trainer itself records it, in the TrainerControl of trainer_state.json. Replaces the Trainer's own
just-in-time saving (`enable_jit_checkpoint`), which stops each rank by itself and hangs when only one rank gets
SIGTERM.
"""

import json
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from transformers import trainer_utils
from transformers.trainer_callback import TrainerCallback

from keepstep import random_generators
from keepstep.autoload.post_import import reason, warn
from keepstep.checkpoints.records import Kind
from keepstep.errors import KeepstepError
from keepstep.framework_run import FrameworkRun
from keepstep.gate import Action
from keepstep.integrations.ownership import Owner, owns
from keepstep.private_members import require

_log: Final = logging.getLogger("keepstep")
_SAVING: Final = ("_save_checkpoint", "save_model", "_save", "_save_optimizer_and_scheduler", "_save_rng_state")
"""The methods of a Trainer that save a part of a checkpoint."""


def remove_own_just_in_time(callback_handler: Any) -> None:
    """Remove the Trainer's own just-in-time callback, and restore the SIGTERM handler that it replaced."""
    for callback in list(callback_handler.callbacks):
        if type(callback).__name__ != "JITCheckpointCallback":
            continue
        require("transformers.trainer_jit_checkpoint.CheckpointManager", callback.jit_manager)
        callback_handler.remove_callback(callback)
        previous = callback.jit_manager._original_sigterm_handler
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)
        _log.info("enable_jit_checkpoint is replaced by Keepstep's just-in-time save, on all ranks at one step")


class _EvaluationLeftError(Exception):
    """Ends an evaluation early; the method that began the evaluation catches it."""


class Protection(TrainerCallback):  # type: ignore[misc]  # transformers may not be installed where mypy is
    """Protects one Trainer while `train` runs. One of its callbacks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._run: FrameworkRun | None = None
        self._resumed: Path | None = None
        self._position = (-1, 0)
        self._saved_step = -1
        self._save_asked = False
        self._own_save = False
        self._said = False
        self._evaluation_owed = False
        self._random_states: dict[str, Any] | None = None
        """The states before the evaluation that is under way; None outside of one."""

    def train(
        self, train: Callable[..., Any], /, resume_from_checkpoint: Any = None, *arguments: Any, **keywords: Any
    ) -> Any:
        """Replaces Trainer.train. If the program names what to resume from, that is used.

        The last checkpoint in its own directory is the one that any script finds, and means the newest there is.
        """
        run = self._begin()
        if run is None:
            return train(resume_from_checkpoint, *arguments, **keywords)
        self._run, has_ended = run, False
        try:
            if self._is_found(run, resume_from_checkpoint):
                resume_from_checkpoint = self._newest(run, resume_from_checkpoint)
            elif resume_from_checkpoint:
                _log.info("resuming from the checkpoint that the program names: path=%s", resume_from_checkpoint)
            if resume_from_checkpoint and resume_from_checkpoint is not True:
                self._resumed = Path(resume_from_checkpoint)
                resume_from_checkpoint = str(resume_from_checkpoint)
                self._bring_best(run, self._resumed)
            result = train(resume_from_checkpoint, *arguments, **keywords)
            run.ended(self._output)
            has_ended = True
            return result
        finally:
            self._run = None
            if not run.stopping:
                run.close(ended=has_ended)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Called before the first step, with the state that training resumes from."""
        if self._run is None or self._resumed is None:
            return
        if self._saves_weights_alone and not self._is_last and not any(self._resumed.glob("rng_state*")):
            _log.warning(
                "resuming with a new optimizer and other random numbers: path=%s hint=with save_only_model, a periodic "
                "checkpoint has the weights alone, and only a just-in-time one has all",
                self._resumed,
            )
        self._saved_step = self._step
        self._run.begins_at(self._step)
        control = (self._trainer.state.stateful_callbacks or {}).get("TrainerControl", {})
        due = control.get("args", {}).get("should_evaluate", False)
        self._evaluation_owed = due and _evaluation_strategy(self._trainer.args) != "no"
        if self._is_last:
            self.on_step_begin()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Called before each step: makes up for an evaluation. The random generators are restored by then."""
        if self._run is None or not self._evaluation_owed:
            return
        self._evaluation_owed = False
        try:
            self._evaluating(self._make_up_for_evaluation)
        except _EvaluationLeftError:
            # The checkpoint that training resumed from is still the newest, and records the evaluation that is owed.
            self._leave(self._run)

    def epoch(self, epoch: Callable[..., None], /, *arguments: Any, **keywords: Any) -> None:
        """Replaces Trainer._run_epoch, which would train one step too many when it resumes where training ended."""
        if self._run is not None and self._is_last:
            self._trainer.control.should_training_stop = True
        else:
            epoch(*arguments, **keywords)

    def after_step(self, log_evaluate_save: Callable[..., None], /, *arguments: Any, **keywords: Any) -> None:
        """Replaces Trainer._maybe_log_save_evaluate, which is called after each step and each epoch."""
        run, control = self._run, self._trainer.control
        if run is None or not owns(Owner.TRAINER):
            log_evaluate_save(*arguments, **keywords)
            return
        if self._asks(run) is Action.SAVE_AND_EXIT:
            evaluation_due = control.should_evaluate or self._evaluation_follows()
            control.should_evaluate = control.should_save = False
            log_evaluate_save(*arguments, **keywords)
            self._stop(run, evaluation_due=evaluation_due)
        if (
            control.should_save
            and not self._is_last
            and run.directories.holds(self._checkpoint)
            and not run.admits(self._step)
        ):
            control.should_save = False
        if control.should_evaluate:
            try:
                self._evaluating(log_evaluate_save, *arguments, **keywords)
            except _EvaluationLeftError:
                self._stop(run, evaluation_due=True)
        else:
            log_evaluate_save(*arguments, **keywords)
        self._announce()
        if self._save_asked:
            self._save_asked = False
            run.save_unasked(self._step, self._save)
        if self._is_last or control.should_training_stop:
            # What follows loads the best checkpoint, and deletes some.
            run.wait()

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        """Called after each batch of an evaluation. Raises _EvaluationLeftError if training must stop there.

        Does nothing in an evaluation that training did not begin.
        """
        if self._run is not None and self._random_states is not None and self._asks(self._run) is Action.SAVE_AND_EXIT:
            # The resumed run repeats the evaluation, which must draw the same numbers again.
            random_generators.restore(self._random_states)
            raise _EvaluationLeftError

    def save(self, save: Callable[..., None], /, *arguments: Any, **keywords: Any) -> None:
        """Replaces Trainer._save_checkpoint: has the checkpoint written aside, and behind the training if nobody looks.

        If it fails on one rank, the others are told, and stop waiting.
        """
        run, checkpoint = self._run, self._checkpoint
        if run is None or self._own_save or not owns(Owner.TRAINER):
            save(*arguments, **keywords)
            return

        def write(path: Path) -> None:
            with self._saving_into(path.parent, checkpoint.parent):
                save(*arguments, **keywords)

        asynchronous = self._asynchronous(run)
        elsewhere = not self._trainer.args.push_to_hub and self._can_save_elsewhere(asynchronous=asynchronous)
        is_saved = run.save(checkpoint, self._step, write, asynchronous=asynchronous, elsewhere=elsewhere)
        if is_saved and not self._saves_weights_alone:
            self._saved_step = self._step
        if not asynchronous:
            # Callbacks that look at the new checkpoint come next.
            self._rotate(checkpoint.parent)

    def _announce(self) -> None:
        """Announce the checkpoint: this rank has saved its files, and other callbacks have added theirs."""
        run, directory = self._run, self._checkpoint.parent
        if run is not None:
            kind = Kind.FINAL if self._is_last else None
            run.announce(kind, then=lambda _: self._rotate(directory) if self._asynchronous(run) else None)
            if self._is_last and not run.last_is_in_volume:
                run.save_unasked(self._step, self._save)

    def _begin(self) -> FrameworkRun | None:
        """Return the run; None when this training is not protected."""
        trainer = self._trainer
        if self._run is not None or not owns(Owner.TRAINER):
            return None
        if getattr(trainer, "hp_search_backend", None) is not None:
            warn("this training is not protected: it is one of a search for hyperparameters")
            return None
        try:
            remove_own_just_in_time(trainer.callback_handler)
            run = FrameworkRun.for_training(self._output)
        except (KeepstepError, AttributeError) as error:
            warn(f"{type(trainer).__qualname__} is not protected: {reason(error)}")
            return None
        if run is None:
            return None
        # Only says so: what Keepstep has saved lies in the volume in any case.
        run.directories.protects(Path(self._output) / "checkpoint-*")
        run.hold_sigterm()
        saves = trainer.args.should_save or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
        if saves and self._asynchronous(run):
            run.expect_saves()
        return run

    def _bring_best(self, run: FrameworkRun, resumed: Path) -> None:
        """Have the best checkpoint there, which the Trainer loads at the end: on a new machine only the newest is."""
        try:
            best = json.loads((resumed / "trainer_state.json").read_bytes())["best_model_checkpoint"]
        except (OSError, ValueError, LookupError, RecursionError):
            # The Trainer says what is wrong with it.
            best = None
        if best is not None and self._trainer.args.load_best_model_at_end:
            run.bring(Path(best), self._output)

    def _is_found(self, run: FrameworkRun, wish: Any) -> bool:
        """Whether the program leaves it to others what to resume from: on one rank is on all of them."""
        last = self._last_in_its_directory()
        is_last = isinstance(wish, (str, Path)) and last is not None and last.resolve() == Path(wish).resolve()
        leaves_it = wish is None or wish is True or is_last
        # Of nodes with a disk of their own, one may have a checkpoint and another one none.
        return leaves_it or not run.same(0, leaves_it)

    def _last_in_its_directory(self) -> Path | None:
        output = Path(self._output).absolute()
        last = trainer_utils.get_last_checkpoint(output) if output.is_dir() else None
        return None if last is None else Path(last)

    def _newest(self, run: FrameworkRun, wish: Any) -> Any:
        """Return what to resume from. `wish`: None if the program says nothing, else the newest in its directory."""
        last = None if wish is None else self._last_in_its_directory()
        step = int(last.name.rpartition("-")[2]) if last else -1
        newest = run.newest_or(last, step, self._output)
        return wish if newest is None and wish is True else newest

    @property
    def _output(self) -> str:
        """The Trainer's output directory, as the program gave it."""
        return str(self._trainer.args.output_dir)

    @property
    def _step(self) -> int:
        step: int = self._trainer.state.global_step
        return step

    @property
    def _checkpoint(self) -> Path:
        return Path(self._trainer._get_output_dir(None)).absolute() / f"checkpoint-{self._step}"

    @property
    def _saves_weights_alone(self) -> bool:
        return bool(getattr(self._trainer.args, "save_only_model", False))

    @property
    def _is_last(self) -> bool:
        return bool(self._step >= self._trainer.state.max_steps)

    def _asks(self, run: FrameworkRun) -> Action:
        """Ask at a new position: an epoch's end and each batch of an evaluation are further ticks of their step."""
        step, tick = self._position
        self._position = (step, tick + 1) if step == self._step else (self._step, 0)
        action = run.action_at(*self._position)
        self._save_asked |= action is Action.SAVE
        return action

    def _evaluating(self, evaluate: Callable[..., None], /, *arguments: Any, **keywords: Any) -> None:
        self._random_states = random_generators.capture()
        try:
            evaluate(*arguments, **keywords)
        finally:
            self._random_states = None

    def _make_up_for_evaluation(self) -> None:
        trainer = self._trainer
        metrics = trainer._evaluate(None, None)
        if not hasattr(trainer, "_determine_best_metric"):
            self._determine_best(metrics)
        elif trainer._determine_best_metric(metrics=metrics, trial=None) and self._is_best():
            trainer.state.best_model_checkpoint = str(self._resumed)

    def _is_best(self) -> bool:
        """Whether the best model is that of this step. Releases before 4.50 do not say which step's it is."""
        step: int = getattr(self._trainer.state, "best_global_step", self._step)
        return step == self._step

    def _determine_best(self, metrics: dict[str, float]) -> None:
        """Choose the best model as transformers before 4.47 does, where that is a part of saving."""
        arguments, state = self._trainer.args, self._trainer.state
        if arguments.metric_for_best_model is None:
            return
        value = metrics[f"eval_{arguments.metric_for_best_model.removeprefix('eval_')}"]
        best = None if state.best_model_checkpoint is None else state.best_metric
        if best is None or (value > best if arguments.greater_is_better else value < best):
            state.best_metric, state.best_model_checkpoint = value, str(self._resumed)

    def _evaluation_follows(self) -> bool:
        """Whether an epoch ends with this step and is evaluated then."""
        arguments, epoch = self._trainer.args, self._trainer.state.epoch
        ends = self._is_last or float(epoch).is_integer()
        return bool(ends and _evaluation_strategy(arguments) == "epoch" and arguments.eval_delay <= epoch)

    def _stop(self, run: FrameworkRun, *, evaluation_due: bool) -> None:
        state = self._trainer.state
        self._trainer.control.should_evaluate = evaluation_due
        if evaluation_due:
            # Of several data sets, the first ones may be evaluated already. The resumed run evaluates them again.
            state.log_history = [entry for entry in state.log_history if not _is_evaluation(entry, self._step)]
        # If it is lost, this is the best that remains: all ranks leave, and the checkpoint before this one is there.
        run.save_unasked(self._step, self._save)
        self._leave(run)

    def _save(self) -> None:
        """Save all of this step, unless that is saved already: an agent may be uploading those files.

        Into a folder of the checkpoint directory if the Trainer's own directory lies outside the volume. Killed in the
        middle, it leaves no `checkpoint-*`, which the Trainer would resume from in vain.
        """
        trainer, run = self._trainer, self._run
        if run is None or (self._saved_step == self._step and run.last_is_in_volume):
            return
        checkpoint = self._checkpoint
        if not run.directories.holds(checkpoint):
            checkpoint = run.directories.in_volume(self._output) / checkpoint.name

        def write(path: Path) -> None:
            weights_alone = self._saves_weights_alone
            self._own_save = True
            try:
                if weights_alone:
                    trainer.args.save_only_model = False
                with self._saving_into(path.parent, checkpoint.parent):
                    trainer._save_checkpoint(trainer.model, None)
            finally:
                if weights_alone:
                    trainer.args.save_only_model = True
                self._own_save = False

        elsewhere = self._can_save_elsewhere(asynchronous=False)
        if not run.save(checkpoint, self._step, write, asynchronous=False, elsewhere=elsewhere):
            return
        with self._saving_into(checkpoint.parent, checkpoint.parent):
            trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        run.announce(Kind.FINAL if self._is_last else None)
        self._saved_step = self._step

    @contextmanager
    def _saving_into(self, directory: Path, place: Path) -> Iterator[None]:
        """Let the Trainer save into `directory`, and note of its checkpoints that they are in `place`."""
        trainer, state = self._trainer, self._trainer.state
        save_to_json = state.save_to_json

        def name_later_place() -> None:
            best = state.best_model_checkpoint
            if best is not None and Path(best).parent == directory:
                state.best_model_checkpoint = str(place / Path(best).name)

        def save_state(*arguments: Any, **keywords: Any) -> None:
            name_later_place()
            save_to_json(*arguments, **keywords)

        trainer._get_output_dir, state.save_to_json = lambda trial: str(directory), save_state
        try:
            yield
        finally:
            del trainer._get_output_dir, state.save_to_json
            name_later_place()

    def _asynchronous(self, run: FrameworkRun) -> bool:
        """Whether training goes on while a checkpoint is written. By default only if no callback may look at it."""
        trainer = self._trainer
        callbacks = (type(one) for one in trainer.callback_handler.callbacks if one is not self and _may_look(one))
        # A Trainer of the program's own may look at any time.
        own = () if _is_from_libraries(type(trainer)) else (type(trainer),)
        looking = next((cls.__qualname__ for cls in (*callbacks, *own)), None)
        asynchronous = run.is_asynchronous(by_default=looking is None)
        if looking is not None and not asynchronous:
            self._say_once(f"training waits for each checkpoint: {looking} may look at it")
        return asynchronous

    def _say_once(self, what: str) -> None:
        if not self._said:
            self._said = True
            _log.info("%s", what)

    def _can_save_elsewhere(self, *, asynchronous: bool) -> bool:
        """Whether no method of the program's saves: it may add files to where a checkpoint usually lies, or note it."""
        owner = next(cls for cls in type(self._trainer).__mro__ if any(name in vars(cls) for name in _SAVING))
        known = _is_from_libraries(owner)
        if not known and asynchronous:
            self._say_once(
                f"training waits for each checkpoint: {owner.__qualname__} has a method of its own to save it"
            )
        return known

    def _rotate(self, directory: Path) -> None:
        """Delete old checkpoints, as the Trainer does it after a save."""
        arguments, state = self._trainer.args, self._trainer.state
        if not arguments.should_save:
            return
        try:
            if hasattr(self._trainer, "_rotate_checkpoints"):
                self._trainer._rotate_checkpoints(use_mtime=True, output_dir=str(directory))
            else:
                trainer_utils.rotate_checkpoints(
                    output_dir=str(directory),
                    save_total_limit=arguments.save_total_limit,
                    best_model_checkpoint=state.best_model_checkpoint,
                    use_mtime=True,
                )
        except OSError as error:
            _log.warning("older checkpoints not deleted: path=%s error=%s", directory, error)

    def _leave(self, run: FrameworkRun) -> None:
        # Not by should_training_stop: at its end a training loads the best model, and may delete what was just saved.
        trainer = self._trainer
        try:
            trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
        except Exception as error:
            _log.warning("a callback failed at the end of training: error=%s", reason(error))
        run.leave()


def _is_from_libraries(cls: type) -> bool:
    """Whether the program has not made this class."""
    return cls.__module__.partition(".")[0] in ("transformers", "trl")


def _may_look(callback: Any) -> bool:
    """Whether this callback may look at a checkpoint: one of the program's, or of a library's with an `on_save`."""
    if not _is_from_libraries(type(callback)):
        return True
    # W&B's uploads checkpoints only if it is asked to.
    is_on = getattr(getattr(callback, "_log_model", None), "is_enabled", True)
    return type(callback).on_save is not TrainerCallback.on_save and bool(is_on)


def _evaluation_strategy(arguments: Any) -> str:
    strategy = getattr(arguments, "eval_strategy", "no")
    return str(getattr(strategy, "value", strategy))


def _is_evaluation(entry: dict[str, Any], step: int) -> bool:
    """Whether this log entry is the result of an evaluation after `step`."""
    return entry.get("step") == step and any(key.startswith("eval_") for key in entry)
