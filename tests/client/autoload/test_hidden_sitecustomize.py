"""A sitecustomize that autoload's own one hides still runs, as it would without Keepstep; so does a usercustomize.

Where another tool's sitecustomize hides autoload's own one, its usercustomize takes over.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.client.autoload.stage import Stage, run, write
from tests.harness.bounds import HANG_SECONDS

from keepstep import autoload


def test_its_own_switch_turns_it_off_and_the_hidden_sitecustomize_runs(stage: Stage, tmp_path: Path) -> None:
    write(tmp_path / "theirs" / "sitecustomize.py", "print('theirs')\n")
    staged = Stage(injected=stage.injected, frameworks=stage.frameworks, more=(tmp_path / "theirs",))
    got = staged.run("import transformers.trainer", KEEPSTEP_AUTOLOAD="0")
    assert (got.stdout, got.stderr) == ("theirs\n", "")
    assert staged.run("import transformers.trainer").stdout == "theirs\nhooked transformers.trainer done\n"


THEIRS: dict[str, Callable[[Path, str, str], Path]] = {
    "module": lambda folder, name, text: write(folder / f"{name}.py", text),
    "package": lambda folder, name, text: write(folder / name / "__init__.py", text),
}


@pytest.mark.parametrize("name", ["sitecustomize", "usercustomize"])
@pytest.mark.parametrize("kind", THEIRS)
@pytest.mark.parametrize(
    "text",
    [
        "import sys\nsys.theirs = __name__\nsys.path.append('/added')\n",
        "raise RuntimeError('theirs is broken')\n",
        "import missing_thing\n",
        "import {name}.part\n",
        "def broken(:\n",
    ],
    ids=["good", "raises", "misses-an-import", "imports-itself", "syntax-error"],
)
def test_the_hidden_file_does_and_says_what_it_did_without_us(
    stage: Stage, tmp_path: Path, name: str, kind: str, text: str, with_user_packages: str
) -> None:
    THEIRS[kind](tmp_path / "theirs", name, text.format(name=name))
    code = f"""if True:
        import sys
        theirs = sys.modules.get({name!r})
        print(theirs and theirs.__file__, theirs and theirs.__spec__.name, getattr(sys, "theirs", None), sys.path[-1])
    """
    python = with_user_packages
    alone = run("-c", code, path=(tmp_path / "theirs",), python=python)
    got = run("-c", code, path=(stage.injected, tmp_path / "theirs"), python=python)
    assert (got.stdout, got.stderr, got.returncode) == (alone.stdout, alone.stderr, alone.returncode)
    path = (stage.injected, tmp_path / "theirs", stage.frameworks)
    hooked = run("-c", "import transformers.trainer", path=path, python=python)
    assert hooked.stdout == "hooked transformers.trainer done\n"


@pytest.mark.parametrize("switch", ["", "0"])
def test_where_another_sitecustomize_hides_ours_usercustomize_begins(
    stage: Stage, tmp_path: Path, switch: str, with_user_packages: str
) -> None:
    write(tmp_path / "theirs" / "sitecustomize.py", "print('theirs')\n")
    path = (tmp_path / "theirs", stage.injected, stage.frameworks)
    code = "import transformers.trainer"
    got = run("-c", code, path=path, environment={"KEEPSTEP_AUTOLOAD": switch}, python=with_user_packages)
    hooked = "" if switch else "hooked transformers.trainer done\n"
    assert (got.stdout, got.stderr) == (f"theirs\n{hooked}", "")


def test_a_damaged_autoload_says_so_once_though_python_runs_two_files_of_it(
    stage: Stage, with_user_packages: str
) -> None:
    (stage.injected / "keepstep" / "autoload" / "zero_code.py").unlink()
    got = run("-c", "print('program')", path=(stage.injected,), python=with_user_packages)
    assert (got.stdout, got.stderr.count("autoload is off: ")) == ("program\n", 1)


def test_the_sitecustomize_that_an_interpreter_has_of_its_own_runs_too(stage: Stage, tmp_path: Path) -> None:
    """Debian's in the standard library, or else that of a tool, behind PYTHONPATH: whichever Python itself takes."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True, timeout=HANG_SECONDS
    )
    (packages,) = (tmp_path / "bare" / "lib").glob("python*/site-packages")
    write(packages / "sitecustomize.py", "print('own')\n")
    python = str(tmp_path / "bare" / "bin" / "python")
    code = "import sitecustomize; print(sitecustomize.__file__)"
    alone = run("-c", code, python=python)
    got = run("-c", f"{code}; import transformers.trainer", path=(stage.injected, stage.frameworks), python=python)
    assert alone.stdout
    assert (got.stdout, got.stderr) == (f"{alone.stdout}hooked transformers.trainer done\n", alone.stderr)


def test_a_hidden_folder_without_code_is_skipped(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "theirs" / "sitecustomize").mkdir(parents=True)
    got = run("-c", "print('program')", path=(stage.injected, tmp_path / "theirs"))
    assert (got.stdout, got.stderr) == ("program\n", "")


CHAINING = """
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
import os
here = os.path.dirname(os.path.abspath(__file__))
print("chaining")
spec = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if entry != here])
if spec is not None:
    spec.loader.exec_module(module_from_spec(spec))
"""
"""As other tools do it: whatever is elsewhere on the path, before them or behind them."""


@pytest.mark.parametrize("order", ["MCP", "CMP", "MPM", "MNCP", "NMP", "CMNP"])
def test_several_tools_that_do_the_same_run_once_each(stage: Stage, tmp_path: Path, order: str) -> None:
    write(tmp_path / "chaining" / "sitecustomize.py", CHAINING)
    write(tmp_path / "plain" / "sitecustomize.py", "print('plain')\n")
    folders = {"M": stage.injected, "N": autoload.path(), "C": tmp_path / "chaining", "P": tmp_path / "plain"}
    path = tuple(folders[letter] for letter in order)
    got = run("-c", "import transformers.trainer", path=(*path, stage.frameworks))
    assert got.stderr == ""
    assert got.stdout.count("hooked") == 1
    assert got.stdout.count("plain") == 1
    assert ("chaining" in got.stdout) == ("C" in order)
