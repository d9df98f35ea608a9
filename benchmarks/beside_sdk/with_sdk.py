"""Runs a program with the checkpointing of the OpenShift AI SDK, from a checkout of it.

    python -m benchmarks.beside_sdk.with_sdk CHECKOUT CONFIGURATION MODULE ARGUMENT…

The SDK pastes its checkpointing into the text of the program: a function of its own, the call of it with a
configuration, the program, and an upload of what the program leaves beside its checkpoints. The same is done here with
the same function. It needs a module of constants; what else that package imports, no pod of the SDK has.
"""

import importlib.util
import json
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

FOLDER: Final = Path("kubeflow", "trainer", "rhai")
INSTRUMENTATION: Final = FOLDER / "instrumentation" / "transformers_checkpoint.py"


def main() -> None:
    checkout, configuration, module, *arguments = sys.argv[1:]
    _load(Path(checkout), FOLDER / "constants.py")
    instrumentation = _load(Path(checkout), INSTRUMENTATION)
    *_, apply_checkpointing, upload_final_model = instrumentation._create_checkpoint_instrumentation(
        json.loads(configuration)
    )
    apply_checkpointing()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    upload_final_model()


def _load(checkout: Path, path: Path) -> ModuleType:
    """Import one module of the SDK by its whole name, without the packages around it."""
    name = ".".join(path.with_suffix("").parts)
    spec = importlib.util.spec_from_file_location(name, checkout / path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
