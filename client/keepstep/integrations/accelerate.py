"""Hugging Face Accelerate: announces what `save_state` wrote, resumes in `load_state()`, ends the loop on a notice.

The loop is the program's own, so a notice takes effect where everything that belongs to a step is done, including the
program's scheduler and counters: when the loop asks for the next batch, when it enters `accumulate` or, if it does
neither, when it is about to step again. Owns the count of steps, because Accelerate has none. Imports nothing of
Accelerate before the program does.
"""

import functools
import logging
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from keepstep.checkpoints.local_checkpoints import next_name
from keepstep.errors import KeepstepError
from keepstep.framework_run import FrameworkRun
from keepstep.gate import Action
from keepstep.integrations.ownership import Owner, claim, owns, protect_new
from keepstep.private_members import require
from keepstep.workers import worker_processes

_log: Final = logging.getLogger("keepstep")
_MARK: Final = "_keepstep_loop"
_AUTOMATIC_NAME: Final = re.compile(r"checkpoint_(\d+)")
_training: "_Loop | None" = None
"""The loop of the Accelerator that last prepared an optimizer; a process has one at a time."""


def install(accelerator: Any) -> None:
    """Protect what this Accelerator trains. Idempotent. Raises AttributeError in a version that is too different."""
    if getattr(accelerator, _MARK, None) is None:
        # Also for one that cannot be protected: its program could not load what its DeepSpeedEngine would save.
        claim(Owner.ACCELERATE)
        require("accelerate.Accelerator", accelerator)
        loop = _Loop(accelerator)
        _hook_classes()
        worker_processes.install()
        loop.attach()


def autoload(module: ModuleType) -> None:
    """Protect every Accelerator that is made from now on."""
    protect_new(module.Accelerator, install)


class _Loop:
    """The training loop around one Accelerator."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._save_state = accelerator.save_state
        self._load_state = accelerator.load_state
        self._accumulate = accelerator.accumulate
        self._prepare = accelerator.prepare
        self._end_training = accelerator.end_training
        self._project = accelerator.project_configuration
        self._run: FrameworkRun | None = None
        self._over = False
        self._counted = 0
        # The optimizers that made the current step. When one of them steps again, the next step begins.
        self._stepped: set[int] = set()
        self._trained_in: list[bool] | None = None
        self._is_only_training = False
        """Whether it is the run's only training without a directory of its own, if it is one."""
        # Not the thread itself: programs pickle what refers to this.
        self._thread = threading.get_ident()
        """Id of the thread that trains."""
        self._asked_step: int | None = None
        # The last checkpoint that the program saved or resumed from: its path, its step, and the arguments of the save.
        self._place: Path | None = None
        self._place_step = -1
        self._arguments: dict[str, Any] = {}

    def attach(self) -> None:
        accelerator = self._accelerator
        accelerator.save_state = self.save_state
        accelerator.load_state = self.load_state
        accelerator.accumulate = self.accumulate
        accelerator.prepare = self.prepare
        accelerator.end_training = self.end_training
        setattr(accelerator, _MARK, self)
        self._begin()

    @property
    def step(self) -> int:
        """Optimizer steps that are done, the same on all ranks."""
        engine = self._deepspeed_engine
        return self._counted if engine is None else int(engine.global_steps)

    def prepare(self, *arguments: Any, **named: Any) -> Any:
        prepared = self._prepare(*arguments, **named)
        self._begin()
        return prepared

    def accumulate(self, *models: Any) -> Any:
        self.between_steps()
        return self._accumulate(*models)

    def save_state(self, output_dir: Any = None, *arguments: Any, **named: Any) -> Any:
        run = self._acting_run()
        automatic = self._project.automatic_checkpoint_naming
        place = self._next_automatic() if automatic else output_dir
        if run is None or place is None or (automatic and place.exists()):
            # Accelerate itself says why it does not save over a checkpoint of its own naming.
            return self._save_state(output_dir, *arguments, **named)
        path, step = Path(place).absolute(), self.step
        run.directories.in_volume(Path(place).parent)

        def write(aside: Path) -> None:
            if aside == path:
                self._save_state(output_dir, *arguments, **named)
            else:
                self._write(aside, *arguments, **named)

        asynchronous = run.is_asynchronous(by_default=False)
        # The program's hooks are told where to, and may note it.
        elsewhere = not self._accelerator._save_model_state_pre_hook
        is_saved = run.save(path, step, write, asynchronous=asynchronous, elsewhere=elsewhere, program_folder=True)
        if not asynchronous:
            self._delete_old()
        run.announce(then=lambda _: self._delete_old() if asynchronous else None)
        if is_saved:
            self._place, self._place_step, self._arguments = path, step, named
        return Path(place)

    def load_state(self, input_dir: Any = None, *arguments: Any, **named: Any) -> Any:
        run = self._acting_run()
        if run is not None:
            run.wait()
        # After the first save or load, the program goes back to what it has saved itself.
        resumes = input_dir is None and self._place is None
        own = [self._automatic_directory] if self._project.automatic_checkpoint_naming else []
        newest = run.newest(*own) if run is not None and resumes else None
        if run is not None and resumes and not own and not self._is_only_training:
            run.require_only_training(resumes=newest is not None)
            self._is_only_training = True
        result = self._load_state(input_dir if newest is None else str(newest), *arguments, **named)
        if run is not None:
            self._loaded(run, newest or (None if input_dir is None else Path(input_dir).expanduser()))
        return result

    def end_training(self) -> Any:
        """Close the run first: Accelerate ends the process group here, which the ranks need to agree."""
        if self._run is not None:
            self._run.close()
        self._over = True
        return self._end_training()

    def about_to_step(self, optimizer: object) -> None:
        """Ask before the next step begins, for a loop that neither iterates a prepared loader nor uses `accumulate`."""
        if id(optimizer) in self._stepped:
            self.between_steps()

    def stepped(self, optimizer: object) -> None:
        if not any(one is optimizer for one in self._accelerator._optimizers):
            return
        if id(optimizer) in self._stepped:
            self._stepped.clear()
        if not self._stepped:
            self._counted += 1
            self._trained_in = self._modes()
            self._thread = threading.get_ident()
        self._stepped.add(id(optimizer))

    def between_steps(self) -> None:
        """Ask what to do, once for each step, and do it. Everything of the last step is done here."""
        step = self.step
        if step == self._asked_step or not self._trains():
            return
        run = self._acting_run()
        if run is None:
            return
        self._asked_step = step
        self._stepped.clear()
        action = run.action_at(step)
        if action is Action.NOTHING:
            return
        if self._place_step != step or not run.last_is_in_volume:
            run.save_unasked(step, functools.partial(self._save_now, run, step))
        if action is Action.SAVE_AND_EXIT:
            run.leave()

    @property
    def _deepspeed_engine(self) -> Any:
        wrapped = getattr(self._accelerator, "deepspeed_engine_wrapped", None)
        return None if wrapped is None else wrapped.engine

    def _begin(self) -> None:
        """Take SIGTERM once this Accelerator has an optimizer, unless an outer framework controls the training."""
        global _training
        if self._run is not None or self._over or not self._accelerator._optimizers or not owns(Owner.ACCELERATE):
            return
        try:
            self._run = FrameworkRun.current()
        except KeepstepError as error:
            self._over = True
            _log.warning("Accelerate is not protected: error=%s hint=%s", error, error.hint)
            return
        if not self._project.automatic_checkpoint_naming:
            # Accelerate refuses an automatic name that is taken, and a program that begins anew counts from 0.
            self._run.directories.show_outside()
        if _training is not None and owns(Owner.ACCELERATE):
            _log.warning("an earlier Accelerator is no longer protected: the one that prepared an optimizer last is")
        _training = self
        saves = self._accelerator.is_main_process or self._deepspeed_engine is not None
        if saves and self._run.is_asynchronous(by_default=False):
            self._run.expect_saves()

    def _acting_run(self) -> FrameworkRun | None:
        """Return the run; None where another framework controls the training, or nothing is protected."""
        acts = _training is self and not self._over and owns(Owner.ACCELERATE)
        return self._run if acts else None

    def _save_now(self, run: FrameworkRun, step: int) -> None:
        path, write = self._next_place(run, step), functools.partial(self._write, **self._arguments)
        if run.save(path, step, write, asynchronous=False, program_folder=True, program_files_of=self._place):
            run.announce()
            self._place, self._place_step = path, step

    def _write(self, path: Path, *arguments: Any, **named: Any) -> None:
        """Save to exactly this path, and let Accelerate count it."""
        automatic = self._project.automatic_checkpoint_naming
        self._project.automatic_checkpoint_naming = False
        try:
            self._save_state(str(path), *arguments, **named)
        finally:
            self._project.automatic_checkpoint_naming = automatic

    def _delete_old(self) -> None:
        """Delete what is too old, as Accelerate does before it saves."""
        limit = self._project.total_limit
        if limit is None or not self._project.automatic_checkpoint_naming or not self._accelerator.is_main_process:
            return
        numbers = {
            int(found[1]): path
            for path in self._automatic_directory.iterdir()
            if (found := _AUTOMATIC_NAME.fullmatch(path.name))
        }
        for number in sorted(numbers)[:-limit]:
            shutil.rmtree(numbers[number], ignore_errors=True)

    def _next_place(self, run: FrameworkRun, step: int) -> Path:
        if self._project.automatic_checkpoint_naming:
            return run.directories.in_volume(self._automatic_directory) / self._next_automatic().name
        if self._place is None:
            return run.checkpoint_directory / f"checkpoint-{step}"
        name = next_name(self._place.name, self._place_step, step, default=f"checkpoint-{step}")
        return run.directories.in_volume(self._place.parent) / name

    def _next_automatic(self) -> Path:
        return self._automatic_directory / f"checkpoint_{self._accelerator.save_iteration}"

    @property
    def _automatic_directory(self) -> Path:
        return Path(self._accelerator.project_dir, "checkpoints")

    def _loaded(self, run: FrameworkRun, path: Path | None) -> None:
        self._asked_step = None
        self._stepped.clear()
        step = None if path is None else run.recorded_step(path)
        self._counted = step or 0
        run.begins_at(self.step)
        if path is None or step is None:
            return
        self._place_step = self.step
        if self._project.automatic_checkpoint_naming:
            self._number_on(path)
        else:
            self._place = path

    def _number_on(self, path: Path) -> None:
        """Continue the automatic names: Accelerate would count from 0 again, and refuses to overwrite a checkpoint."""
        taken = [path.name]
        if self._automatic_directory.is_dir():
            taken += [one.name for one in self._automatic_directory.iterdir()]
        numbers = [int(found[1]) for name in taken if (found := _AUTOMATIC_NAME.fullmatch(name))]
        self._project.iteration = max([self._project.iteration, *(number + 1 for number in numbers)])

    def _modes(self) -> list[bool]:
        # `eval` of a DeepSpeed engine changes its module's flag, and never its own.
        engine = self._deepspeed_engine
        models = self._accelerator._models
        return [model.module.training if model is engine else model.training for model in models]

    def _trains(self) -> bool:
        """Whether this is the training loop, and not an evaluation or another thread that reads ahead."""
        if threading.get_ident() != self._thread:
            return False
        modes = self._modes()
        return modes == self._trained_in if self._trained_in is not None else any(modes) or not modes


def _hook_classes() -> None:
    """Hook the optimizer and loader classes, for every Accelerator: `for` looks up `__iter__` in the class alone."""
    optimizer = sys.modules["accelerate.optimizer"].AcceleratedOptimizer
    loaders = sys.modules["accelerate.data_loader"]
    if not hasattr(optimizer.step, _MARK):
        optimizer.step = _marked(_telling_step(optimizer.step))
    for loader in (loaders.DataLoaderShard, loaders.DataLoaderDispatcher):
        if not hasattr(loader.__iter__, _MARK):
            loader.__iter__ = _marked(_telling_iterator(loader.__iter__))


def _telling_step(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def step_and_tell(self: Any, *arguments: Any, **named: Any) -> Any:
        loop = _training
        if loop is None or not self.gradient_state.sync_gradients:
            return step(self, *arguments, **named)
        loop.about_to_step(self)
        result = step(self, *arguments, **named)
        loop.stepped(self)
        return result

    return step_and_tell


def _telling_iterator(iterate: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    @functools.wraps(iterate)
    def iterate_and_tell(self: Any) -> Iterator[Any]:
        for batch in iterate(self):
            yield batch
            if _training is not None:
                _training.between_steps()

    return iterate_and_tell


def _marked(function: Callable[..., Any]) -> Callable[..., Any]:
    setattr(function, _MARK, True)
    return function
