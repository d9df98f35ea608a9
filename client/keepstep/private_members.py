"""The private members of other libraries that Keepstep uses, where those have no public way, and the check for them.

Each is used in one place, after `require` has found it there. docs/compatibility.md lists them with their use, and
pyproject.toml caps the version of each library that is tested. Imports nothing of these libraries.
"""

import platform
import sys
from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Final

PRIVATE_MEMBERS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "accelerate.Accelerator": ("_models", "_optimizers", "_save_model_state_pre_hook"),
        "deepspeed.DeepSpeedEngine": ("_common_checkpoint_state",),
        "lightning.AsyncCheckpointIO": ("_executor",),
        "lightning.ModelCheckpoint": (
            "_every_n_train_steps",
            "_last_global_step_saved",
            "_link_checkpoint",
            "_save_checkpoint",
        ),
        "lightning.Trainer": (
            "_accelerator_connector.cluster_environment",
            "_checkpoint_connector.resume_start",
            "_signal_connector.register_signal_handlers",
            "fit_loop._combined_loader",
            "fit_loop._data_fetcher",
            "fit_loop._load_combined_loader_states",
            "fit_loop._should_accumulate",
            "fit_loop.epoch_loop._should_check_val_fx",
        ),
        "lightning.callbacks": ("_early_exit",),
        "multiprocessing.forkserver": ("_forkserver._preload_modules",),
        "torch.distributed.checkpoint._async_process_executor": ("_AsyncCheckpointProcess._checkpointing_subprocess",),
        "torch.distributed.distributed_c10d": ("_get_default_store",),
        "torch.storage.TypedStorage": ("_untyped_storage",),
        "torch.utils.data._utils.worker": ("_worker_loop",),
        "torchdata.stateful_dataloader.stateful_dataloader": ("_worker_loop",),
        "transformers.Trainer": (
            "_evaluate",
            "_get_output_dir",
            "_maybe_log_save_evaluate",
            "_save_checkpoint",
        ),
        # Only looked for: older releases have none.
        "transformers.Trainer since 4.47": ("_determine_best_metric",),
        "transformers.Trainer before 5": ("_rotate_checkpoints",),
        "transformers.Trainer since 5": ("_run_epoch",),
        "transformers.trainer_jit_checkpoint.CheckpointManager": ("_original_sigterm_handler",),
    }
)
"""Module, or class of objects -> its members, as paths of attributes."""


def require(owner: str, found: object) -> None:
    """Check that `found`, which is the module `owner` or such an object, has its members of the table above.

    Raises AttributeError that names the library, its version and what is missing. Call it before anything is changed.
    """
    for path in PRIVATE_MEMBERS[owner]:
        try:
            attrgetter(path)(found)
        except AttributeError:
            library = owner.partition(".")[0]
            # Lightning has two packages of the same releases.
            module = sys.modules.get(library) or sys.modules.get(f"pytorch_{library}")
            version = getattr(module, "__version__", None)
            release = f"{library} {version}" if version else f"Python {platform.python_version()}"
            raise AttributeError(
                f"{release} has no {owner}.{path}, which Keepstep uses: install a release that "
                "docs/compatibility.md names; if it is newer than those, report this"
            ) from None
