"""DeepSpeed: announces what `save_checkpoint` wrote, resumes in `load_checkpoint`, ends the loop on a notice.

The loop is the program's own, so a notice takes effect where everything that belongs to a step is done: before the
first forward pass of the next step. Only the program knows its `client_state`, so a just-in-time checkpoint has the
object that was passed to the last save, as it is by then, or what was loaded. Imports nothing of DeepSpeed by itself.
"""

import functools
import logging
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from keepstep.autoload.post_import import reason
from keepstep.checkpoints.local_checkpoints import next_name
from keepstep.errors import ErrorKind, KeepstepError, RestoreError
from keepstep.framework_run import FrameworkRun
from keepstep.gate import Action
from keepstep.integrations import process_group
from keepstep.integrations.ownership import Owner, claim, owns, protect_new
from keepstep.private_members import require
from keepstep.workers import worker_processes

_log: Final = logging.getLogger("keepstep")
_MARK: Final = "_keepstep_training"
_current: "_Training | None" = None
"""The training of the engine with an optimizer that was made last; a process has one at a time."""


def install(engine: Any) -> None:
    """Protect what this engine trains. Idempotent."""
    global _current
    if engine.optimizer is None or _MARK in vars(engine):
        return
    training = _Training(engine)
    try:
        # From here on SIGTERM is a termination notice.
        training.run = FrameworkRun.current()
    except KeepstepError as error:
        _log.warning("DeepSpeed is not protected: error=%s hint=%s", error, error.hint)
        return
    worker_processes.install()
    process_group.announce_before_it_ends()
    training.attach()
    claim(Owner.DEEPSPEED)
    if _current is not None and owns(Owner.DEEPSPEED):
        _log.warning("an earlier DeepSpeedEngine is no longer protected: the one that was made last is")
    _current = training
    if owns(Owner.DEEPSPEED):
        training.run.directories.show_outside()
    if training.run.is_asynchronous(by_default=False):
        # ZeRO's optimizers train a copy of the model, and rank 0 saves both.
        training.run.expect_saves(engine.module if engine.global_rank == 0 else None)


def autoload(module: ModuleType) -> None:
    """Protect every engine that is made from now on."""
    protect_new(module.DeepSpeedEngine, install)


class _Training:
    """The training loop around one engine."""

    run: FrameworkRun

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._save = engine.save_checkpoint
        self._load = engine.load_checkpoint
        self._train_batch = getattr(engine, "train_batch", None)
        self._background = _writes_in_background(engine.checkpoint_engine)
        self._warned = False
        self._asked_step: int | None = None
        self._saves_now = False
        """Whether this is a save that the program does not know of."""
        self._has_training_mode = False
        self._own_keys = None if hasattr(engine, "_common_checkpoint_state") else _keys_before_0_19()
        try:
            if self._own_keys is None:
                require("deepspeed.DeepSpeedEngine", engine)
        except AttributeError as error:
            _log.warning("just-in-time checkpoints are without the client_state: error=%s", error)
        # The last checkpoint that the program saved or resumed from: its path and its step.
        self._place: Path | None = None
        self._place_step = -1
        self._directory: Any = None
        """Where the program saves to or loads from, as it gave it."""
        self._client_state: dict[str, Any] = {}
        self._client_step: int | None = None

    def attach(self) -> None:
        engine = self._engine
        engine.save_checkpoint = self.save_checkpoint
        engine.load_checkpoint = self.load_checkpoint
        if self._train_batch is not None:
            # A pipeline has no forward pass of its own.
            engine.train_batch = self.train_batch
        engine.register_forward_pre_hook(self._before_forward)
        setattr(engine, _MARK, self)

    @property
    def step(self) -> int:
        return int(self._engine.global_steps)

    def save_checkpoint(
        self, save_dir: Any, tag: Any = None, client_state: Any = None, *arguments: Any, **named: Any
    ) -> Any:
        step = self.step
        tag = f"global_step{step}" if tag is None else str(tag)
        client_state = {} if client_state is None else client_state
        if not self._acts or not self._announceable:
            return self._save(save_dir, tag, client_state, *arguments, **named)
        path = Path(save_dir, tag).absolute()
        self.run.directories.in_volume(save_dir)
        if path.parent != Path(save_dir).absolute():
            # A tag may have folders in it.
            self.run.directories.file_under(path.parent, Path(save_dir))

        def write(place: Path) -> None:
            # The file that names the newest checkpoint is written beside it, and follows it.
            directory = save_dir if place == path else str(place.parent)
            self._save(directory, tag, client_state, *arguments, **named)

        is_saved = self.run.save(
            path,
            step,
            write,
            asynchronous=self.run.is_asynchronous(by_default=False),
            elsewhere=path.name == tag,
            program_folder=True,
            program_files_of=self._place if self._saves_now else None,
        )
        self.run.announce()
        if not self._saves_now:
            self._directory = save_dir
        if is_saved:
            self._place, self._place_step = path, step
            self._client_state, self._client_step = client_state, step
        return True

    def load_checkpoint(self, load_dir: Any, tag: Any = None, *arguments: Any, **named: Any) -> Any:
        """Resume from the newest checkpoint, unless the program names a tag or loads the weights alone.

        Loading the weights alone begins a training and continues none.
        """
        if self._acts:
            self.run.wait()
        # After the first save or load, the program goes back to what it has saved itself.
        is_first = self._place is None
        resumes = self._acts and tag is None and is_first and not named.get("load_module_only") and not self._universal
        # Then it reads more than each rank's own shares.
        reads_all = arguments or not named.get("load_optimizer_states", True) or self._engine.zero_elastic_checkpoint()
        self._directory = load_dir if self._directory is None else self._directory
        needed = functools.partial(self._needed, bool(reads_all))
        newest = self.run.newest_files(needed, load_dir) if resumes else None
        if newest is not None:
            names = [path.name for path in newest.directory.iterdir()]
            if not newest.files and (error := other_ranks_error(str(newest.place), names, self._world_size())):
                raise SystemExit(f"keepstep: {error}; {error.hint}")
            load_dir, tag = str(newest.directory.parent), newest.directory.name
        path, client_state = self._load(load_dir, tag, *arguments, **named)
        if newest is not None and path is not None and newest.directory != newest.place:
            # Programs read the step from it.
            path = str(newest.place / Path(path).relative_to(newest.directory))
        self._asked_step = None
        if self._acts:
            self.run.begins_at(self.step)
        if newest is not None:
            self._place, self._place_step = newest.place, self.step
        if path is not None:
            self._client_state, self._client_step = client_state, self.step
        return path, client_state

    def train_batch(self, *arguments: Any, **named: Any) -> Any:
        assert self._train_batch is not None
        self.between_steps()
        return self._train_batch(*arguments, **named)

    def between_steps(self) -> None:
        """Ask what to do, once for each step, and do it. Everything of the last step is done here."""
        step = self.step
        if step == self._asked_step or not self._acts:
            return
        self._asked_step = step
        action = self.run.action_at(step)
        if action is Action.NOTHING:
            return
        if self._place_step != step or not self.run.last_is_in_volume:
            self.run.save_unasked(step, functools.partial(self._save_now, step))
        if action is Action.SAVE_AND_EXIT:
            self.run.leave()

    def _before_forward(self, engine: Any, inputs: object) -> None:
        # The engine's `eval` changes its module's flag, and never its own. Some programs train in eval mode all along.
        self._has_training_mode |= engine.module.training
        if engine.module.training or not self._has_training_mode:
            self.between_steps()

    def _needed(self, reads_all: bool, files: Sequence[str], ranks: Sequence[int]) -> Sequence[str]:
        """Return the files that these ranks read; none for all. Raises RestoreError before anything is brought."""
        if (error := other_ranks_error("the newest checkpoint", files, self._world_size())) is not None:
            raise error
        return () if reads_all else files_of(files, ranks, world_size=self._world_size())

    def _world_size(self) -> int:
        distributed: Any = sys.modules["torch.distributed"]
        return int(distributed.get_world_size()) if distributed.is_initialized() else 1

    @property
    def _acts(self) -> bool:
        """Whether this engine's training is the one protected here; false where another framework controls it."""
        return _current is self and owns(Owner.DEEPSPEED)

    @property
    def _universal(self) -> bool:
        return bool(self._engine.load_universal_checkpoint())

    @property
    def _announceable(self) -> bool:
        if self._background and not self._warned:
            self._warned = True
            _log.warning("DeepSpeed's checkpoints are not protected: its checkpoint engine writes in the background")
        return not self._background

    def _save_now(self, step: int) -> None:
        default = f"global_step{step}"
        directory, tag = self.run.checkpoint_directory, default
        if self._directory is not None:
            directory = self.run.directories.in_volume(self._directory)
        if self._place is not None:
            tag = next_name(self._place.name, self._place_step, step, default=default)
        client_state, passed_at = self._programs_client_state(), self._client_step
        if client_state and passed_at != step:
            _log.warning("the saved client_state is of an earlier step: step=%d passed_at=%s", step, passed_at)
        self._saves_now = True
        try:
            self._engine.save_checkpoint(str(directory), tag, client_state)
        finally:
            self._saves_now = False

    def _programs_client_state(self) -> dict[str, Any]:
        """Return the program's part of the client state.

        What was loaded also has some of the engine's own state, which must not replace the engine's current state.
        """
        engine = self._engine
        try:
            own = self._own_keys or engine._common_checkpoint_state(
                {}, engine.zero_optimization(), save_frozen_param=False
            )
        except Exception as error:
            _log.warning("checkpoint saved without client_state: step=%d error=%s", self.step, reason(error))
            return {}
        own = {*own, "frozen_param_shapes", "frozen_param_fragments", "num_experts"}
        if not any(key in own for key in self._client_state):
            return self._client_state
        return {key: value for key, value in self._client_state.items() if key not in own}


def _writes_in_background(checkpoint_engine: Any) -> bool:
    # Releases before 0.17 do not say; one of their checkpoint engines does, Nebula's.
    if not hasattr(checkpoint_engine, "is_decoupled"):
        return type(checkpoint_engine).__name__ != "TorchCheckpointEngine"
    return bool(checkpoint_engine.is_decoupled())


def _keys_before_0_19() -> frozenset[str] | None:
    """Return the keys of the engine's own state in a checkpoint, as all releases before 0.19 have them; else None."""
    release = re.match(r"(\d+)\.(\d+)", sys.modules["deepspeed"].__version__)
    if release is None or (int(release[1]), int(release[2])) >= (0, 19):
        return None
    return frozenset(
        (
            *("buffer_names", "data_sampler", "dp_world_size", "ds_config", "ds_version", "global_samples"),
            *("global_steps", "lr_scheduler", "module", "mp_world_size", "optimizer", "param_shapes", "random_ltd"),
            *("shared_params", "skipped_steps", "sparse_tensor_module_names"),
        )
    )


_ZERO_SHARE: Final = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(optim|model)_states\.pt")


def files_of(files: Sequence[str], ranks: Sequence[int], *, world_size: int) -> Sequence[str]:
    """Return the files of a checkpoint that these ranks read; none for all.

    With ZeRO each rank has shares of its own, and reads no other. Where models are parallel too, the numbers in their
    names are not those of ranks.
    """
    shares = {path: found for path in files if (found := _ZERO_SHARE.fullmatch(path)) is not None}
    optimizers = sorted(int(found[1]) for found in shares.values() if found[3] == "optim" and int(found[2]) == 0)
    if len(optimizers) != sum(found[3] == "optim" for found in shares.values()) or optimizers != [*range(world_size)]:
        return ()
    return [path for path in files if path not in shares or int(shares[path][1]) in ranks]


def other_ranks_error(name: str, files: Iterable[str], world_size: int) -> RestoreError | None:
    """Return the error for a ZeRO checkpoint of another number of ranks; None if it has as many, or no shares.

    DeepSpeed cannot divide the optimizer's states anew, and finds out only after it has loaded the model.
    """
    shares = filter(None, map(_ZERO_SHARE.fullmatch, files))
    saved_by = sum(found[3] == "optim" for found in shares)
    if saved_by in (0, world_size):
        return None
    return RestoreError(
        ErrorKind.NOT_RESTORED,
        f"{name} was saved by {saved_by} ranks with ZeRO, and this job has {world_size}: DeepSpeed cannot load it",
        hint=f"start the job with {saved_by} ranks, or convert the checkpoint with "
        f"`python -m deepspeed.checkpoint.ds_to_universal --input_folder {name} --output_folder OUT` "
        'and set {"checkpoint": {"load_universal": true}} in DeepSpeed\'s configuration',
    )
