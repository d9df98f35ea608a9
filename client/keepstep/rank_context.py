"""The ranks that save together: this process alone, or the ranks of torch.distributed's process group.

Owns the choice between the two. It is made once, at the first question that all ranks must answer alike, because a
Checkpointer may be made before the process group is.
"""

import itertools
import math
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from keepstep.checkpoints.local_checkpoints import LocalCheckpoints
from keepstep.errors import ErrorKind, StoreLostError, UsageError
from keepstep.gate import Gate, RanksGate, SingleProcessGate
from keepstep.gate.sigterm import Sigterm
from keepstep.ranks.coordinator import RankCoordinator, SingleProcess, StoreCoordinator
from keepstep.ranks.rank_store import job_ranks, open_rank_store
from keepstep.ranks.rank_watch import RankWatch
from keepstep.ranks.rendezvous import rendezvous
from keepstep.settings import Settings
from keepstep_api import names

_numbers: Final = itertools.count()
"""Numbers the contexts of one process; all ranks make them in the same order."""
_NOTICE_SECONDS: Final = 10.0
"""Most that one wait takes after SIGTERM if no agent knows how long the grace period is. torchrun and Kubernetes give
30 s by default: two waits, and time to end. Without an agent nothing is stored that a longer wait could lose."""


_LEAVING_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """The ranks that save together. `nonce` identifies this start of the job and is the same on all ranks."""

    coordinator: RankCoordinator
    gate: Gate
    local: LocalCheckpoints
    nonce: str

    @property
    def leads_pod(self) -> bool:
        """Whether this rank does names, records and rotation for all ranks that share its directory."""
        return self.coordinator.ranks.leads_pod


def init_ranks(
    settings: Settings,
    sigterm: Sigterm,
    *,
    rank0_only: bool,
    holds_liveness_lock: bool,
    grace_seconds: Callable[[], float | None],
) -> RankContext:
    """Find the ranks that save together, and wait for them. Raises UsageError, OSError.

    Args:
        settings: Of this process.
        sigterm: Of this process.
        rank0_only: This process writes for all, whatever ranks there are.
        holds_liveness_lock: Whether this process has that of its local rank.
        grace_seconds: How much is left of the grace period after a notice; None if nobody knows.
    """
    signal_path = settings.state_directory / names.SIGNAL_FILE
    ranks = None if rank0_only else job_ranks(settings.ranks)
    if ranks is None or ranks.world_size == 1:
        if not rank0_only:
            _refuse_lone_follower(settings)
        return _context(settings, SingleProcess(), SingleProcessGate(signal_path, sigterm), secrets.token_hex(4))

    def notice_seconds(sees_all: bool) -> float | None:
        if not sigterm.received:
            return None
        left = grace_seconds()
        if left is None or left <= 0:
            # One that is over and has not ended this was not known.
            return math.inf if sees_all else _NOTICE_SECONDS
        # Where ranks may be gone unseen, half is for what follows the wait; else only what it takes to leave.
        return max(0.0, left - _LEAVING_SECONDS) if sees_all else left / 2

    watch = partial(RankWatch, others=ranks.world_size - 1, notice_seconds=notice_seconds)
    lock = str(settings.ranks.local_rank) if holds_liveness_lock else ""
    try:
        store = open_rank_store(ranks, f"keepstep/{next(_numbers)}", watch({}))
        nonce, ranks, locks = rendezvous(store, _volume_identity(settings.state_directory), lock)
        folder = settings.state_directory / names.RANKS_DIRECTORY
        store = store.below(nonce, ranks, watch({rank: folder / name for rank, name in locks.items()}))
    except StoreLostError as error:
        raise UsageError(
            ErrorKind.UNSUPPORTED,
            f"the ranks cannot agree on what to save: {error}",
            hint="use Keepstep alike on every rank, or let rank 0 save for all, with Checkpointer(rank0_only=True) "
            "there and none elsewhere",
        ) from error
    gate = RanksGate(signal_path, sigterm, store.below("gate", ranks))
    return _context(settings, StoreCoordinator(store.below("job", ranks)), gate, nonce)


def _context(settings: Settings, coordinator: RankCoordinator, gate: Gate, nonce: str) -> RankContext:
    local = LocalCheckpoints(
        volume=settings.volume,
        directory=settings.checkpoint_directory,
        run_directory=settings.run_directory,
        records=settings.records_directory,
        saving=settings.state_directory / names.SAVING_DIRECTORY,
        nonce=nonce,
    )
    return RankContext(coordinator=coordinator, gate=gate, local=local, nonce=nonce)


def _volume_identity(state_directory: Path) -> str:
    """Return an id that all processes that see this volume share, wherever it is mounted. Raises OSError."""
    # In this folder trainers that run as another user than the agent may write, too.
    path = state_directory / names.RANKS_DIRECTORY / names.VOLUME_IDENTITY
    if not path.exists():
        own = path.with_name(f".{names.VOLUME_IDENTITY}.{secrets.token_hex(8)}")
        own.write_text(own.name)
        try:
            # A link appears with its whole content, and the first one stays.
            os.link(own, path)
        except FileExistsError:
            pass
        except OSError:
            # Without hard links, two processes that come at once may be taken for two pods.
            own.replace(path)
        finally:
            own.unlink(missing_ok=True)
    return path.read_text()


def _refuse_lone_follower(settings: Settings) -> None:
    if settings.ranks.rank > 0:
        raise UsageError(
            ErrorKind.UNSUPPORTED,
            f"rank {settings.ranks.rank} would save alone: torch.distributed has no process group",
            hint="call init_process_group before the first resume, should_save or save; or let rank 0 save for all, "
            "with Checkpointer(rank0_only=True) there and none elsewhere",
        )
