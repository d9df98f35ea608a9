"""What autoload costs a program and its children, and that it breaks none."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tests.client.autoload.stage import Stage, run, write
from tests.harness.bounds import HANG_SECONDS

from keepstep import autoload


def test_the_folder_for_pythonpath_holds_what_python_looks_for_by_itself_alone() -> None:
    entries = {entry.name for entry in autoload.path().iterdir() if entry.name != "__pycache__"}
    assert entries == {"sitecustomize.py", "usercustomize.py"}


def test_a_program_without_a_framework_gets_three_small_modules_and_no_package() -> None:
    code = "import sys; print(*sorted(sys.modules))"
    without = set(run("-c", code).stdout.split())
    got = run("-c", code, path=(autoload.path(),))
    of_python = {
        "importlib",
        "importlib._bootstrap",
        "importlib._bootstrap_external",
        "importlib.machinery",
        "warnings",
    }
    ours = {"sitecustomize", "keepstep.autoload.post_import", "_keepstep_autoload.zero_code"}
    assert got.stderr == ""
    # Debian's Python has a sitecustomize of its own.
    assert set(got.stdout.split()) - of_python - (without - ours) == ours


def test_the_start_of_an_interpreter_costs_less_than_20_milliseconds() -> None:
    def seconds(*path: Path) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run("-c", "pass", path=path)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # Processor time, the least of several and in turns: what else the machine does counts little.
    pairs = [(seconds(), seconds(autoload.path())) for _ in range(15)]
    alone, with_autoload = (min(times) for times in zip(*pairs, strict=True))
    # A machine on which Python itself takes longer than that to start is a slow one.
    assert with_autoload - alone < max(0.020, alone)


def test_an_integration_that_fails_costs_one_warning_and_nothing_else(stage: Stage) -> None:
    text = "def autoload(module):\n    raise AttributeError('no such\\nthing')\n"
    write(stage.injected / "keepstep" / "integrations" / "hugging_face.py", text)
    got = stage.run("import transformers.trainer, accelerate.accelerator; print(transformers.trainer.DONE)")
    assert got.stdout == "hooked accelerate.accelerator done\ndone\n"
    assert got.stderr == "keepstep: transformers.Trainer is not protected: AttributeError: no such thing\n"
    assert got.returncode == 0


def test_a_client_that_cannot_be_imported_is_off_with_one_warning(stage: Stage) -> None:
    write(stage.injected / "keepstep" / "__init__.py", "import grpc_that_nobody_has\n")
    got = stage.run("import transformers.trainer, accelerate.accelerator; print(transformers.trainer.DONE)")
    assert (got.stdout, got.returncode) == ("done\n", 0)
    assert got.stderr.count("\n") == 1
    assert got.stderr.startswith(
        "keepstep: autoload is off, the package keepstep cannot be imported: ModuleNotFoundError"
    )


@pytest.mark.parametrize("damage", ["", "1 / 0\n", "def begin():\n"])
def test_a_damaged_autoload_is_off_with_one_warning_and_hides_nothing(
    stage: Stage, tmp_path: Path, damage: str
) -> None:
    file = stage.injected / "keepstep" / "autoload" / "zero_code.py"
    file.write_text(damage) if damage else file.unlink()
    write(tmp_path / "theirs" / "sitecustomize.py", "print('theirs')\n")
    staged = Stage(injected=stage.injected, frameworks=stage.frameworks, more=(tmp_path / "theirs",))
    got = staged.run("import transformers.trainer; print(transformers.trainer.DONE)")
    assert (got.stdout, got.returncode) == ("theirs\ndone\n", 0)
    assert got.stderr.startswith("keepstep: autoload is off: ")
    assert got.stderr.count("\n") == 1


def test_an_autoload_of_another_version_leaves_the_package_its_own_table(stage: Stage) -> None:
    file = stage.injected / "keepstep" / "autoload" / "zero_code.py"
    file.write_text(file.read_text().replace("TRAINERS", "OTHER_NAME"))
    package = str(Path(autoload.__file__).parents[2])
    got = stage.run(f"import sys; sys.path.insert(0, {package!r}); import keepstep; print(keepstep.protect)")
    assert got.stdout.startswith("<function protect"), got.stderr
    assert got.returncode == 0


def test_a_program_without_stderr_is_not_broken_by_a_warning(stage: Stage) -> None:
    write(stage.injected / "keepstep" / "__init__.py", "1 / 0\n")
    code = f"exec {sys.executable} -c 'import transformers.trainer; print(transformers.trainer.DONE)' 2>&-"
    environment = {**os.environ, "PYTHONPATH": f"{stage.injected}:{stage.frameworks}"}
    got = subprocess.run(["sh", "-c", code], env=environment, stdout=subprocess.PIPE, timeout=HANG_SECONDS, check=False)
    assert (got.stdout, got.returncode) == (b"done\n", 0)


@pytest.mark.parametrize("flag", ["-E", "-I", "-S"])
def test_pythons_own_switches_turn_it_off(flag: str) -> None:
    code = "import sys; print(any('autoload' in name for name in sys.modules))"
    assert run(flag, "-c", code, path=(autoload.path(),)).stdout == "False\n"


PROGRAM = """
import multiprocessing, subprocess, sys
if __name__ != "__main__" or sys.argv[1] == "here":
    import transformers.trainer
def child():
    import accelerate.accelerator
    print("child", accelerate.accelerator.DONE, flush=True)
if __name__ == "__main__":
    if sys.argv[1] == "subprocess":
        subprocess.run([sys.executable, __file__, "here"], check=True)
    elif sys.argv[1] != "here":
        process = multiprocessing.get_context(sys.argv[1]).Process(target=child)
        process.start()
        process.join()
        sys.exit(process.exitcode)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing_are_no_trainers(stage: Stage, tmp_path: Path, method: str) -> None:
    program = write(tmp_path / "program.py", PROGRAM)
    got = run(str(program), method, path=(stage.injected, stage.frameworks))
    assert (got.stdout, got.stderr, got.returncode) == ("child done\n", "", 0)


def test_a_program_that_is_started_by_another_is_a_trainer(stage: Stage, tmp_path: Path) -> None:
    program = write(tmp_path / "program.py", PROGRAM)
    got = run(str(program), "subprocess", path=(stage.injected, stage.frameworks))
    assert (got.stdout, got.stderr, got.returncode) == ("hooked transformers.trainer done\n", "", 0)


def test_an_interpreter_without_keepstep_takes_it_from_beside_autoload_and_nothing_else(
    stage: Stage, tmp_path: Path
) -> None:
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True, timeout=HANG_SECONDS
    )
    write(stage.injected / "keepstep_api" / "__init__.py", "")
    write(stage.injected / "another_package" / "__init__.py", "")
    code = """if True:
        import importlib.util, transformers.trainer, keepstep, keepstep_api
        print(keepstep.__file__)
        print(importlib.util.find_spec("another_package"))
    """
    folder = stage.injected / "keepstep" / "autoload" / "path"
    python = str(tmp_path / "bare" / "bin" / "python")
    got = run("-c", code, path=(folder, stage.frameworks), python=python)
    expected = f"hooked transformers.trainer done\n{stage.injected / 'keepstep' / '__init__.py'}\nNone\n"
    assert (got.stdout, got.stderr) == (expected, "")
