"""Autoload's table: which module of which framework calls which integration when it is imported.

Owns the table, and the decision where it does not apply. Runs at the start of every interpreter, before `keepstep` is
imported. The first framework that is imported imports `keepstep`; if that fails, autoload is off. Under `keepstep run`,
a process that imports torch first notes itself in a file, so that the runner can tell where autoload is not active.
"""

import os
import sys

# sitecustomize has loaded that module before, so this line does not import the package.
from keepstep.autoload.post_import import after_import, forget_all, reason, warn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

TRAINERS = {
    ("transformers.trainer", "Trainer"): "hugging_face",
    ("lightning.pytorch.trainer.trainer", "Trainer"): "lightning",
    ("pytorch_lightning.trainer.trainer", "Trainer"): "lightning",
    ("accelerate.accelerator", "Accelerator"): "accelerate",
    ("deepspeed.runtime.engine", "DeepSpeedEngine"): "deepspeed",
}
"""(module, name) of a framework's class -> the integration for it and for what derives from it."""
_MODULES = (
    ("torch.distributed.checkpoint.state_dict_saver", "keepstep.integrations.dcp", "torch.distributed.checkpoint is"),
    ("torch.utils.data._utils.worker", "keepstep.workers.worker_processes", "DataLoader workers are"),
    (
        "torchdata.stateful_dataloader.stateful_dataloader",
        "keepstep.workers.worker_processes",
        "StatefulDataLoader workers are",
    ),
    (
        "torch.distributed.checkpoint._async_process_executor",
        "keepstep.workers.worker_processes",
        "the checkpoint writer process is",
    ),
    ("torch.multiprocessing.spawn", "keepstep.ranks.spawned", "the parent of torch.multiprocessing's ranks is"),
)
_MODULES_WHEN_LAZY = (
    ("torch.distributed.distributed_c10d", "keepstep.integrations.process_group", "resuming with lazy restore is"),
)
"""Every process that imports torch would import `keepstep` for these."""
_PACKAGES = ("keepstep", "keepstep_api")
packages_folder = ""
"""Holds `keepstep`, for interpreters that do not have it themselves; empty until `begin`."""


def begin(folder: str) -> None:
    """Wait for the frameworks. `folder` becomes `packages_folder`."""
    global packages_folder
    packages_folder = folder
    sys.meta_path.insert(0, _Packages(folder))
    processes = os.environ.get("KEEPSTEP_AUTOLOAD_PROCESSES")
    if processes and "torch" in sys.modules:
        _note_process(processes)
    elif processes:
        sys.meta_path.insert(0, _BeforeTorch(processes))
    if not _serves_multiprocessing():
        for (module, cls), integration in TRAINERS.items():
            what = f"{module.partition('.')[0]}.{cls} is"
            after_import(module, what, _caller(f"keepstep.integrations.{integration}"))
        is_lazy = os.environ.get("KEEPSTEP_RESTORE") == "lazy"
        for module, hook, what in (*_MODULES, *(_MODULES_WHEN_LAZY if is_lazy else ())):
            after_import(module, what, _caller(hook))


class _Packages:
    """Finds Keepstep's own packages in a folder if no other finder does, and nothing else that lies there.

    A folder of the name is no package: the default volume of `keepstep run` is one, in the program's directory.
    """

    def __init__(self, folder: str) -> None:
        # In a checkout, the two packages lie apart.
        self._folders = [folder, os.path.join(os.path.dirname(folder), "proto")]  # noqa: PTH118, PTH120

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name not in _PACKAGES:
            return None
        from importlib.machinery import PathFinder

        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                found: ModuleSpec | None = finder.find_spec(name, path, target)
                if found is not None and found.origin is not None:
                    return found
        return PathFinder.find_spec(name, self._folders)


class _BeforeTorch:
    """Finds nothing. Notes this process when it is asked for torch, so before torch's libraries are loaded."""

    def __init__(self, file: str) -> None:
        self._file = file

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name == "torch":
            # A new list: another thread that looks for a module may be iterating over the old one.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
            _note_process(self._file)
        return None


def _note_process(file: str) -> None:
    """Append what the kernel says of this process to the file, if there is such a file. Ignores OSError."""
    try:
        with open("/proc/self/stat", "rb") as stat:  # noqa: PTH123 - pathlib may not be imported
            line = stat.read()
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
    except OSError:
        pass


def _serves_multiprocessing() -> bool:
    """Whether this interpreter is a spawned child, a fork server or a resource tracker of another program.

    Such a child imports the program's main module, and with it the frameworks, before it knows that it is a child.
    """
    arguments = getattr(sys, "orig_argv", ())
    return any(argument.startswith("from multiprocess") for argument in arguments)


def _is_child_of_multiprocessing() -> bool:
    """Whether this process was forked as a worker, after the hooks were made."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _caller(integration: str) -> "Callable[[ModuleType], None]":
    def call(module: "ModuleType") -> None:
        if _is_child_of_multiprocessing():
            return
        try:
            import keepstep  # noqa: F401
        except Exception as error:
            forget_all()
            warn(f"autoload is off, the package keepstep cannot be imported: {reason(error)}")
            return
        from importlib import import_module

        import_module(integration).autoload(module)

    return call
