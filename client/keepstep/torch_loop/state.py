"""The whole state of a training, into a directory and out of it: what a resumed run needs to end bit-identical.

Owns what belongs to that state and how it lies in a checkpoint of `torch.distributed.checkpoint` (DCP):

model, optimizer    as DCP stores them: each rank its shards, to be loaded by any number of ranks
shared              one item, the same on all ranks: step, epoch, scheduler, scaler, and how many ranks there were
ranks.<rank>        one item for each rank: its random generators and its place in the data

Also owns the iterator over the data, because the order matters: the sampler learns its epoch, then the iterator is
made, which draws a seed from the generators, and only then the generators continue where they were. Must not know who
decides when and where to save. Every rank makes the same calls.
"""

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from keepstep import random_generators
from keepstep.errors import ErrorKind, UsageError
from keepstep.torch_loop.plain_values import decode, encode, require_plain
from keepstep.torch_loop.storage import Source, Storage, not_ours

_RANKS: Final = "ranks"
_SHARED: Final = "shared"


class TrainingState:
    """The whole state of a training, to save into a directory and to restore from one.

    Args:
        model: As it is trained: plain, in DDP, or sharded by `fully_shard`.
        optimizer: Of this model.
        scheduler: Anything with `state_dict` and `load_state_dict`.
        scaler: The same, for mixed precision.
        loader: Any DataLoader. One with a `state_dict`, such as torchdata's StatefulDataLoader, continues at its place
            at once. From any other the batches of the unfinished epoch that were used already are read again and
            dropped.
        trust_pickle: Save and load any object, as `torch.load(weights_only=False)` does. Whoever can write to the
            destination can then run code here. Otherwise only tensors and plain values are saved and loaded.

    Attributes:
        step: Optimizer steps that are done. The program raises it.
        epoch: Epochs that are done. `batches` raises it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        loader: Any = None,
        trust_pickle: bool = False,
    ) -> None:
        self.step = 0
        self.epoch = 0
        self.storage = Storage(trust_pickle=trust_pickle)
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._scaler = scaler
        self._loader = loader
        self._batch = 0
        self._epoch_began_with: dict[str, Any] | None = None
        self._restored: dict[str, Any] | None = None

    def save(self, directory: Path) -> None:
        """Write the state into an empty directory, which the ranks share. Collective, over a process group of its own.

        Raises:
            UsageError: A part is neither a tensor nor a plain value.
            VolumeError: A rank cannot write.
        """
        self.storage.save(self.capture(), directory)

    def restore(self, directory: Source) -> None:
        """Load what `save` wrote, as far as this rank needs it, with the same or another number of ranks. Collective.

        The random generators continue where they were when `batches` has made its iterator, or at once without loader.

        Raises:
            UsageError: It is not the state of this training.
        """
        rank, stored = str(self.storage.rank), self.storage.open(directory)
        has_own = f"{_RANKS}.{rank}" in stored.items
        has_moments = any(item.startswith("optimizer.state.") for item in stored.items)
        with nullcontext() if has_moments else _untouched(self._optimizer):
            state = {**self._model_and_optimizer(), _SHARED: b"", _RANKS: {rank: b""} if has_own else {}}
            stored.load(state)
            set_state_dict(
                self._model, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
        shared = self._decoded(state[_SHARED], _SHARED)
        own = self._decoded(state[_RANKS][rank], f"{_RANKS}.{rank}") if has_own else None
        try:
            self._take_shared(shared)
            self._take_own(own, ranks_then=shared["world_size"])
        except Exception as error:
            # These are plain values, but not those that `save` writes.
            raise not_ours(directory, repr(error)) from error

    def batches(self, epochs: int | None = None) -> Iterator[Any]:
        """Iterate over the batches that are left until `epochs` epochs are done; without `epochs`, for ever.

        Tells the sampler each epoch.

        Raises:
            UsageError: There is no loader.
        """
        if self._loader is None:
            raise UsageError(ErrorKind.BAD_ARGUMENT, "there are no batches", hint="give a loader")
        while epochs is None or self.epoch < epochs:
            for batch in self._begin_epoch():
                self._batch += 1
                yield batch
            self.epoch += 1
            self._batch = 0

    def capture(self) -> dict[str, Any]:
        """The state as `torch.distributed.checkpoint` takes it, with the live tensors: they change with the next step.

        Raises:
            UsageError: A part could not be loaded again; the error names it.
        """
        shared = {
            "step": self.step,
            "epoch": self.epoch,
            "batch": self._batch,
            "world_size": self.storage.world_size,
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
        }
        own = {
            "generators": random_generators.capture(),
            "epoch_began_with": self._epoch_began_with if self._batch else None,
            "loader": self._loader.state_dict() if self._batch and hasattr(self._loader, "state_dict") else None,
        }
        with _untouched(self._optimizer):
            state = self._model_and_optimizer()
        if not self.storage.trust_pickle:
            for name, value in state.items():
                require_plain(value, name, taken_apart=True)
            for name, value in (*shared.items(), *own.items()):
                require_plain(value, name)
        # As bytes each is one item, whatever a scheduler or a loader keeps, and does not change once captured.
        return {**state, _SHARED: encode(shared), _RANKS: {str(self.storage.rank): encode(own)}}

    def _model_and_optimizer(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def _decoded(self, encoded: bytes, name: str) -> dict[str, Any]:
        value: dict[str, Any] = decode(encoded, name, trust_pickle=self.storage.trust_pickle)
        return value

    def _take_shared(self, shared: dict[str, Any]) -> None:
        self.step, self.epoch, self._batch = shared["step"], shared["epoch"], shared["batch"]
        for part, name in ((self._scheduler, "scheduler"), (self._scaler, "scaler")):
            if part is not None and shared[name] is not None:
                part.load_state_dict(shared[name])

    def _take_own(self, own: dict[str, Any] | None, *, ranks_then: int) -> None:
        if own is None:
            _seed_anew(self.step, self.storage.rank)
        if ranks_then != self.storage.world_size:
            # With another number of ranks, each rank's share of the data has another size. Rounded down: a few batches
            # may come twice, and none is left out.
            self._batch = self._batch * ranks_then // self.storage.world_size
            own = None if own is None else {**own, "loader": None}
        if own is not None and self._loader is None:
            random_generators.restore(own["generators"])
            own = None
        self._restored = own

    def _begin_epoch(self) -> Iterator[Any]:
        for name in ("sampler", "batch_sampler"):
            set_epoch = getattr(getattr(self._loader, name, None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch)
        restored, self._restored = self._restored, None
        if restored is None:
            return self._make_iterator(skip=self._batch)
        began_with = restored["epoch_began_with"]
        # The iterator must draw the same again: its workers' seed, and a random sampler's order.
        random_generators.restore(restored["generators"] if began_with is None else began_with)
        if restored["loader"] is not None:
            self._loader.load_state_dict(restored["loader"])
        iterator = self._make_iterator(skip=0 if restored["loader"] is not None else self._batch)
        if began_with is not None:
            random_generators.restore(restored["generators"])
        return iterator

    def _make_iterator(self, *, skip: int) -> Iterator[Any]:
        self._epoch_began_with = random_generators.capture()
        iterator: Iterator[Any] = iter(self._loader)
        for _ in islice(iterator, skip):
            pass
        return iterator


@contextmanager
def _untouched(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep torch from making the state of an optimizer that has none.

    torch would take a step with zero gradients to make it. Before training has begun, that step counts. With an
    optimizer that never has a state, its gradients take as much memory as the model at every save. torch takes the step
    only when no parameter has a gradient, so the smallest parameter gets a gradient of zeros meanwhile.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if optimizer.state or any(parameter.grad is not None for parameter in parameters):
        yield
        return
    smallest = min(parameters, key=torch.Tensor.numel)
    smallest.grad = torch.zeros_like(smallest)
    try:
        yield
    finally:
        smallest.grad = None
        # In case another version of torch takes the step all the same.
        optimizer.state.clear()


def _seed_anew(*parts: int) -> None:
    """Seed the generators from these numbers, for a rank that has no state of its own to continue from."""
    seed = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
