"""What is in a Lightning checkpoint, when it is written, and which one is the last.

Owns what the integration knows of Lightning's loops and of its checkpoint's format; nothing of saving and leaving.
"""

import base64
import io
from concurrent.futures import Future
from typing import Any, Final

from mooring.checkpoints.records import Kind
from mooring.framework_run import FrameworkRun

_BEGUN: Final = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
"""The progress of an evaluation in its first batch."""
_RANDOM_STATES: Final = "mooring_random_states"
"""In a checkpoint."""


def look_for_what_is_used(trainer: Any) -> None:
    """Raises AttributeError or KeyError in a version whose loops are too different, before anything depends on them."""
    fit_loop = trainer.fit_loop
    for owner, name in (
        (fit_loop, "_data_fetcher"),
        (fit_loop, "_combined_loader"),
        (fit_loop, "_should_accumulate"),
        (fit_loop.epoch_loop, "_should_check_val_fx"),
        (fit_loop.epoch_progress.current, "processed"),
    ):
        getattr(owner, name)
    state = fit_loop.state_dict()
    for progress in ("epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress"):
        for part in ("total", "current"):
            _ = {name: state[progress][part][name] for name in _BEGUN}
    _ = state["state_dict"], state["epoch_loop.batch_progress"]["is_last_batch"]


def owe_what_follows(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Have a resumed training do what is due after the batch at whose end this is saved.

    A validation, from its first batch also when it is under way: Lightning would skip it. The end of an epoch, if the
    loader knows that it is there: Lightning would count one epoch too many, without a batch.
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
    """Those of all ranks, in what rank 0 writes; where others write too, each has its own."""
    states = {trainer.global_rank: own}
    gathered = run.gather(trainer.global_step, _encode(own))
    if gathered is not None:
        states |= {rank: _decode(state) for rank, state in enumerate(gathered)}
    checkpoint[_RANDOM_STATES] = {"world_size": trainer.world_size, "states": states}


def random_states(trainer: Any, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """This rank's; None when they are not those of as many ranks."""
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


def tell_samplers_epoch(trainer: Any) -> None:
    """Tell the samplers which epoch they shuffle for."""
    fit_loop = trainer.fit_loop
    for loader in fit_loop._combined_loader.flattened:
        for owner in (loader, getattr(loader, "batch_sampler", None)):
            set_epoch = getattr(getattr(owner, "sampler", None), "set_epoch", None)
            if callable(set_epoch):
                set_epoch(fit_loop.epoch_progress.current.processed)


def kind(trainer: Any) -> Kind | None:
    """Final when the training has reached what it was to reach."""
    steps_done = 0 < trainer.max_steps <= trainer.global_step
    epochs = trainer.fit_loop.epoch_progress.current.processed
    return Kind.FINAL if steps_done or 0 < (trainer.max_epochs or 0) <= epochs else None


def written(trainer: Any, failure: OSError | None) -> "Future[Any] | None":
    """Done when the checkpoint that was just saved is on disk; None when it is already. `failure`: it will never be."""
    future: Future[Any] = Future()
    if failure is not None:
        future.set_exception(failure)
        return future
    plugin = trainer.strategy.checkpoint_io
    if not any(cls.__name__ == "AsyncCheckpointIO" for cls in type(plugin).__mro__):
        return None
    if plugin._executor is not None:
        # Its one thread comes to this after the write.
        future = plugin._executor.submit(int)
    else:
        # Another rank writes.
        future.set_result(None)
    return future


def is_accumulating(trainer: Any) -> bool:
    """Whether there are gradients that no optimizer step has used."""
    return bool(trainer.fit_loop._should_accumulate())


def is_validating(trainer: Any) -> bool:
    """Whether a hook at the end of a validation's batch asks."""
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
    return bool(trainer.validating and progress.completed < progress.processed)
