"""A stage on which each framework can be imported, and each hook says so; a Python that imports usercustomize."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.client.autoload.stage import HOOKED, HOOKS, Stage, write
from tests.harness.bounds import HANG_SECONDS

from keepstep import autoload


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    injected, frameworks = tmp_path / "injected", tmp_path / "frameworks"
    shutil.copytree(autoload.path().parent, injected / "keepstep" / "autoload")
    for file in autoload.path().glob("*.py"):
        shutil.copy(file, injected)
    write(injected / "keepstep" / "__init__.py", "")
    for name in HOOKS:
        text = "def autoload(module):\n    print('hooked', module.__name__, module.DONE, flush=True)\n"
        write(injected / "keepstep" / name, text)
        write((injected / "keepstep" / name).parent / "__init__.py", "")
    for name in (*HOOKED, "torch.distributed.distributed_c10d"):
        folder = frameworks
        for part in name.split(".")[:-1]:
            folder = folder / part
            write(folder / "__init__.py", "")
        write(folder / f"{name.rpartition('.')[2]}.py", "DONE = 'late'\nDONE = 'done'\n")
    return Stage(injected=injected, frameworks=frameworks)


@pytest.fixture(scope="session")
def with_user_packages(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that imports usercustomize, as one does that is in no virtual environment."""
    environment = tmp_path_factory.mktemp("environment")
    command = [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", str(environment)]
    subprocess.run(command, check=True, timeout=HANG_SECONDS)
    return str(environment / "bin" / "python")
