"""A program that looks for its checkpoint itself, under lazy restore: all of it is brought once the ranks have met.

A program that calls torch.distributed.checkpoint looks for the newest folder before it loads. So the folder must be
there by then, and whole: whoever opens it would not notice a hole. Autoload hooks init_process_group, because all ranks
call it, and they choose there. Frameworks that Keepstep protects and TorchLoop ask for themselves, some of them for
less, so this module leaves their programs alone. A program without a process group makes no such call.
"""

import functools
import os
import sys
import threading
from typing import Any, Final

from keepstep.errors import KeepstepError
from keepstep.framework_run import FrameworkRun
from keepstep_api import names

_ASK_THEMSELVES: Final = frozenset(
    {
        "transformers.trainer",
        "lightning.pytorch.trainer.trainer",
        "pytorch_lightning.trainer.trainer",
        "accelerate.accelerator",
        "deepspeed.runtime.engine",
        "keepstep.torch_loop",
    }
)
"""Modules of frameworks that autoload hooks, and of our own: whoever has imported one asks when it resumes."""


def autoload(module: Any) -> None:
    """Wrap `init_process_group` of torch.distributed.distributed_c10d; idempotent."""
    original = module.init_process_group
    if hasattr(original, "__keepstep__"):
        return

    @functools.wraps(original)
    def init_process_group(*arguments: Any, **keywords: Any) -> None:
        original(*arguments, **keywords)
        if _must_bring(module):
            _bring()

    init_process_group.__keepstep__ = True  # type: ignore[attr-defined]
    module.init_process_group = init_process_group


def announce_before_it_ends() -> None:
    """Have checkpoints announced before the program destroys the group by whose store the ranks agree. Idempotent."""
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    original = getattr(module, "destroy_process_group", None)
    if original is None or hasattr(original, "__keepstep__"):
        return

    @functools.wraps(original)
    def destroy_process_group(*arguments: Any, **keywords: Any) -> Any:
        FrameworkRun.announce_before_ranks_part()
        return original(*arguments, **keywords)

    destroy_process_group.__keepstep__ = True  # type: ignore[attr-defined]
    package: Any = sys.modules.get("torch.distributed")
    if getattr(package, "destroy_process_group", None) is original:
        package.destroy_process_group = destroy_process_group
    module.destroy_process_group = destroy_process_group


_brought = False


def _must_bring(distributed: Any) -> bool:
    """Return whether this is the first group of all ranks that the launcher has started, and nobody else asks."""
    # Helpers have groups of their own, such as an inference server beside the trainer.
    launched = os.environ.get("WORLD_SIZE", str(distributed.get_world_size()))
    return (
        not _brought
        and launched == str(distributed.get_world_size())
        and threading.current_thread() is threading.main_thread()
        and _ASK_THEMSELVES.isdisjoint(sys.modules)
    )


def _bring() -> None:
    """Have the newest checkpoint brought to its place, and name it in KEEPSTEP_RESUME. Raises SystemExit."""
    global _brought
    _brought = True
    try:
        run = FrameworkRun()
    except KeepstepError as error:
        # Training from step 0 over what was saved would be worse than stopping.
        raise SystemExit(f"keepstep: {error}; {error.hint}") from error
    try:
        newest = run.newest()
    finally:
        # SIGTERM is the program's again.
        run.close()
    if newest is not None:
        os.environ[names.ENV_RESUME] = str(newest)
