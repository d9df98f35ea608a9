"""What is in a Lightning checkpoint, when it is written, and which one is the last.

Owns what the integration knows of Lightning's loops and of its checkpoint's format; nothing of saving and leaving.
"""

import base64
import io
import logging
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from keepstep import random_generators
from keepstep.asynchronous_saves.save_functions import hand_in, opened
from keepstep.checkpoints.records import Kind
from keepstep.framework_run import FrameworkRun
from keepstep.private_members import require

_log: Final = logging.getLogger("keepstep")
_BEGUN: Final = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
"""Lightning's counters of an evaluation that is in its first batch."""
_QUIET_HOOKS: Final = ("on_save_checkpoint", "on_load_checkpoint", "on_fit_start")
"""Hooks of a model that come before the first save, or within one."""
_RANDOM_STATES: Final = "keepstep_random_states"
"""The key in a checkpoint."""


def look_for_what_is_used(trainer: Any) -> None:
    """Check for what Keepstep uses of Lightning. Raises AttributeError or KeyError if this version is too different.

    Call it before anything depends on it.
    """
    require("lightning.Trainer", trainer)
    if _is_a(trainer.strategy.checkpoint_io, "AsyncCheckpointIO"):
        require("lightning.AsyncCheckpointIO", trainer.strategy.checkpoint_io)
    for callback in trainer.callbacks:
        if _is_a(callback, "BatchSizeFinder", "LearningRateFinder"):
            require("lightning.callbacks", callback)
        if _is_a(callback, "ModelCheckpoint"):
            require("lightning.ModelCheckpoint", callback)
    _ = trainer.fit_loop.epoch_progress.current.processed
    state = trainer.fit_loop.state_dict()
    for progress in ("epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress"):
        for part in ("total", "current"):
            _ = {name: state[progress][part][name] for name in _BEGUN}
    _ = state["state_dict"], state["epoch_loop.batch_progress"]["is_last_batch"]


def say_what_is_not_resumed(package: str, checkpoint: dict[str, Any]) -> None:
    """Warn in a release that does less, resumed in the middle of an epoch, than it would have done uninterrupted."""
    version = import_module(package.partition(".")[0]).__version__
    ends_epoch = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"]
    if not ends_epoch and tuple(int(number) for number in version.split(".")[:2]) < (2, 5):
        _log.warning(
            "resuming within an epoch, where Lightning %s skips what is due at its end, such as a step of a learning "
            "rate scheduler, and counts its batches anew: hint=install Lightning 2.5 or newer",
            version,
        )


def owe_what_follows(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Make a resumed training do what is due after the batch at whose end this checkpoint is saved.

    That is a validation, from its first batch even if it is under way: Lightning would skip it. It is also the end of
    an epoch, if the loader's state is saved: Lightning would count one epoch too many, without a batch.
    """
    loops = checkpoint["loops"]["fit_loop"]
    batches, validated = loops["epoch_loop.batch_progress"], loops["epoch_loop.val_loop.batch_progress"]
    fit_loop = trainer.fit_loop
    owes_validation = is_validating(trainer)
    if batches["total"]["completed"] < batches["total"]["processed"]:
        owes_validation = fit_loop.epoch_loop._should_check_val_fx(fit_loop._data_fetcher)
        if owes_validation or (batches["is_last_batch"] and "combined_loader" in loops["state_dict"]):
            for progress in (batches["total"], batches["current"]):
                progress["completed"] = progress["processed"]
    if owes_validation:
        validated |= {"total": dict(_BEGUN), "current": dict(_BEGUN), "is_last_batch": False}


def keep_random_states(trainer: Any, run: FrameworkRun, checkpoint: dict[str, Any], own: dict[str, Any]) -> None:
    """Put the random states into the checkpoint: in rank 0's those of all ranks, in any other rank's its own.

    `own` has them as they are now, and as they were before this epoch's iterators were made.
    """
    states = {trainer.global_rank: own}
    gathered = run.gather(trainer.global_step, _encode(own))
    if gathered is not None:
        states |= {rank: _decode(state) for rank, state in enumerate(gathered)}
    checkpoint[_RANDOM_STATES] = {"world_size": trainer.world_size, "states": states}


def random_states(trainer: Any, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """Return this rank's random states; None if there are none, or if they are of another number of ranks."""
    kept = checkpoint.get(_RANDOM_STATES)
    if kept is None or kept["world_size"] != trainer.world_size:
        return None
    state: dict[str, Any] | None = kept["states"].get(trainer.global_rank)
    return state


def _encode(state: dict[str, Any]) -> str:
    import torch

    buffer = io.BytesIO()
    torch.save(state, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def _decode(text: str) -> dict[str, Any]:
    import torch

    state: dict[str, Any] = torch.load(io.BytesIO(base64.b64decode(text)), map_location="cpu", weights_only=True)
    return state


def capture_random_states(trainer: Any) -> dict[str, Any]:
    """Return the states of the global random generators, and of the training loaders' own."""
    return random_generators.capture() | {"loaders": [one.get_state() for one in _loader_generators(trainer)]}


def restore_random_states(trainer: Any, states: dict[str, Any]) -> None:
    random_generators.restore(states)
    for generator, state in zip(_loader_generators(trainer), states.get("loaders", ()), strict=False):
        generator.set_state(state.cpu())


def begin_workers(trainer: Any) -> None:
    """Make the first iterators of loaders whose workers stay: they draw a seed, and those of later epochs do not."""
    if trainer.current_epoch:
        for loader in trainer.fit_loop._combined_loader.flattened:
            if getattr(loader, "persistent_workers", False) and not hasattr(loader, "load_state_dict"):
                iter(loader)


def _loader_generators(trainer: Any) -> list[Any]:
    """Return the generators of the program's own that its training loaders and their samplers have, each once."""
    import torch

    found = []
    combined = trainer.fit_loop._combined_loader
    # In the sanity check there are none yet.
    for loader in () if combined is None else combined.flattened:
        batches = getattr(loader, "batch_sampler", None)
        owners = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
        found += [getattr(owner, "generator", None) for owner in owners]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def skip_batches(trainer: Any) -> None:
    """Skip the batches of this epoch that were trained before training was stopped, as far as loaders do not.

    Call it before the first batch. The random states must be those of the epoch's start when the iterators are made.
    """
    fit_loop = trainer.fit_loop
    done = fit_loop.epoch_loop.batch_progress.current.processed
    fetcher = fit_loop._data_fetcher
    if not 0 < done < trainer.num_training_batches or fit_loop.epoch_loop.batch_progress.is_last_batch:
        return
    is_stateful = any(hasattr(loader, "load_state_dict") for loader in fit_loop._combined_loader.flattened)
    if is_stateful or _is_a(fetcher, "_DataLoaderIterDataFetcher"):
        if not all(hasattr(loader, "load_state_dict") for loader in fit_loop._combined_loader.flattened):
            _log.warning("the data of this epoch begin anew: batches_done=%d hint=use a loader that is stateful", done)
        return
    for _ in range(done):
        next(fetcher)
    # The loop itself counts them.
    fetcher.fetched -= done


def tell_samplers_epoch(trainer: Any) -> None:
    """Tell the samplers which epoch they shuffle for."""
    fit_loop = trainer.fit_loop
    for loader in fit_loop._combined_loader.flattened:
        for owner in (loader, getattr(loader, "batch_sampler", None)):
            set_epoch = getattr(getattr(owner, "sampler", None), "set_epoch", None)
            if callable(set_epoch):
                set_epoch(fit_loop.epoch_progress.current.processed)


def leave_step_saved(trainer: Any) -> None:
    """Let no ModelCheckpoint save the step that training resumes from once more.

    It does not know that it has saved that step, and with gradient accumulation the step's number still is the same
    after the next batch. Its file of the whole step would become one of the midst of an accumulation.
    """
    step = trainer.global_step
    for callback in trainer.callbacks:
        # Those that save after a validation or an epoch may not have saved this step yet.
        if (
            _is_a(callback, "ModelCheckpoint")
            and callback._every_n_train_steps
            and not (step % callback._every_n_train_steps)
        ):
            callback._last_global_step_saved = step


def without_barrier(trainer: Any) -> Any:
    """Return what `ModelCheckpoint._link_checkpoint` needs of a Trainer, to call it in a thread on one rank."""
    return SimpleNamespace(
        is_global_zero=trainer.is_global_zero, strategy=SimpleNamespace(barrier=lambda *_, **__: None)
    )


def step_of(trainer: Any, path: Any) -> int:
    """Return the step of a checkpoint that is a file; -1 for any other, and for one that cannot be read."""
    try:
        return int(trainer.strategy.checkpoint_io.load_checkpoint(path, map_location="cpu")["global_step"])
    except Exception as error:
        _log.warning("its step is not known: path=%s error=%r", path, error)
        return -1


def kind(trainer: Any) -> Kind | None:
    """Return FINAL when the training has reached its last step or epoch, else None."""
    steps_done = 0 < trainer.max_steps <= trainer.global_step
    epochs = trainer.fit_loop.epoch_progress.current.processed
    return Kind.FINAL if steps_done or 0 < (trainer.max_epochs or 0) <= epochs else None


def _is_a(found: Any, *classes: str) -> bool:
    return any(cls.__name__ in classes for cls in type(found).__mro__)


def written(trainer: Any, failure: OSError | None) -> "Future[Any] | None":
    """Return a future that is done when the checkpoint that was just saved is on disk; None if it already is.

    `failure`: why the save failed; the future then raises it.
    """
    future: Future[Any] = Future()
    if failure is not None:
        future.set_exception(failure)
        return future
    plugin = trainer.strategy.checkpoint_io
    if not _is_a(plugin, "AsyncCheckpointIO"):
        return None
    if plugin._executor is not None:
        # The executor's one thread comes to this after the write.
        future = plugin._executor.submit(int)
    else:
        # Another rank writes.
        future.set_result(None)
    return future


@contextmanager
def handing_in(trainer: Any) -> Iterator[None]:
    """Let the file of Lightning's checkpoint be written later, where Keepstep's save is open."""
    plugin = trainer.strategy.checkpoint_io
    save = plugin.save_checkpoint

    def save_checkpoint(checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if storage_options is not None or not hand_in(checkpoint, path, _write):
            save(checkpoint, path, storage_options)

    plugin.save_checkpoint = save_checkpoint
    try:
        yield
    finally:
        del plugin.save_checkpoint


def _write(checkpoint: dict[str, Any], target: Any) -> None:
    """Write what Lightning writes, byte by byte, without the memory in which it first collects the whole file."""
    import torch

    # A path would make the file's own name a part of it.
    with opened(target) as file:
        torch.save(checkpoint, file)


def can_be_elsewhere(trainer: Any) -> bool:
    """Whether a checkpoint can be written to another path than Lightning's, and to its own later."""
    return type(trainer.strategy.checkpoint_io).__name__ == "TorchCheckpointIO"


def nobody_looks(trainer: Any) -> bool:
    """Whether it is known of callbacks, loggers and the model's hooks that they look at no new checkpoint."""
    has_hooks = any(
        name.startswith("on_") and name not in _QUIET_HOOKS
        for cls in type(trainer.lightning_module).__mro__
        if not _is_from_lightning(cls)
        for name in vars(cls)
    )
    looks = any(map(_may_look, trainer.callbacks)) or any(map(_uses_checkpoints, trainer.loggers))
    return not has_hooks and not looks


def _is_from_lightning(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")


def _may_look(callback: Any) -> bool:
    is_ours = type(callback).__module__.startswith("keepstep.")
    # What a LambdaCallback calls is the program's.
    return not is_ours and (not _is_from_lightning(type(callback)) or _is_a(callback, "LambdaCallback"))


def _uses_checkpoints(logger: Any) -> bool:
    if not _is_from_lightning(type(logger)):
        return True
    owner = next(cls.__name__ for cls in type(logger).__mro__ if "after_save_checkpoint" in vars(cls))
    # TensorBoard's does nothing, and those that upload checkpoints do so only if they are asked to.
    return owner not in ("Logger", "TensorBoardLogger") and bool(getattr(logger, "_log_model", True))


def is_accumulating(trainer: Any) -> bool:
    """Whether there are gradients that no optimizer step has used."""
    return bool(trainer.fit_loop._should_accumulate())


def is_validating(trainer: Any) -> bool:
    """Whether this is called from a hook at the end of a validation batch."""
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
    return bool(trainer.validating and progress.completed < progress.processed)
