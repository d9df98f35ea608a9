"""Autoload in real interpreters: what it costs and hooks, and that it breaks no program.

Frameworks and integrations are stand-ins of a few lines here; tests/trainers runs the real ones.
"""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mooring import autoload

HOOKS = (
    *(f"integrations/{name}.py" for name in ("hugging_face", "lightning", "accelerate", "deepspeed", "dcp")),
    "integrations/process_group.py",
    "workers/worker_processes.py",
    "ranks/spawned.py",
)
HOOKED = (
    "transformers.trainer",
    "lightning.pytorch.trainer.trainer",
    "pytorch_lightning.trainer.trainer",
    "accelerate.accelerator",
    "deepspeed.runtime.engine",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.utils.data._utils.worker",
    "torch.distributed.checkpoint._async_process_executor",
    "torchdata.stateful_dataloader.stateful_dataloader",
    "torch.multiprocessing.spawn",
)
_TIMEOUT_SECONDS = 100.0


def run(
    *arguments: str, path: tuple[Path, ...] = (), environment: Mapping[str, str] | None = None, python: str = ""
) -> "subprocess.CompletedProcess[str]":
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MOORING_"))}
    variables |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [python or sys.executable, *arguments],
        env=variables | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Folders for PYTHONPATH: Mooring as an injection brings it, and the program's frameworks."""

    injected: Path
    frameworks: Path
    more: tuple[Path, ...] = field(default=())

    def run(self, code: str, *flags: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        path = (self.injected, *self.more, self.frameworks)
        return run(*flags, "-c", code, path=path, environment=environment)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    injected, frameworks = tmp_path / "injected", tmp_path / "frameworks"
    shutil.copytree(autoload.path().parent, injected / "mooring" / "autoload")
    shutil.copy(autoload.path() / "sitecustomize.py", injected)
    write(injected / "mooring" / "__init__.py", "")
    for name in HOOKS:
        text = "def autoload(module):\n    print('hooked', module.__name__, module.DONE, flush=True)\n"
        write(injected / "mooring" / name, text)
        write((injected / "mooring" / name).parent / "__init__.py", "")
    for name in (*HOOKED, "torch.distributed.distributed_c10d"):
        folder = frameworks
        for part in name.split(".")[:-1]:
            folder = folder / part
            write(folder / "__init__.py", "")
        write(folder / f"{name.rpartition('.')[2]}.py", "DONE = 'late'\nDONE = 'done'\n")
    return Stage(injected=injected, frameworks=frameworks)


def test_the_folder_for_pythonpath_holds_one_file() -> None:
    assert [entry.name for entry in autoload.path().iterdir() if entry.name != "__pycache__"] == ["sitecustomize.py"]


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
    ours = {"sitecustomize", "mooring.autoload.post_import", "_mooring_autoload.zero_code"}
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
    assert min(pair[1] for pair in pairs) - min(pair[0] for pair in pairs) < 0.020


@pytest.mark.parametrize("name", HOOKED)
def test_each_framework_is_hooked_once_its_module_is_complete(stage: Stage, name: str) -> None:
    got = stage.run(f"import {name}; import {name}; print('program')")
    assert (got.stdout, got.stderr) == (f"hooked {name} done\nprogram\n", "")


@pytest.mark.parametrize(("restore", "hooked"), [("lazy", True), ("whole", False), ("", False)])
def test_process_groups_are_hooked_for_lazy_restore_alone(stage: Stage, restore: str, hooked: bool) -> None:
    """Every process that imports torch imports that module."""
    name = "torch.distributed.distributed_c10d"
    got = stage.run(f"import {name}, sys; print('mooring.integrations' in sys.modules)", MOORING_RESTORE=restore)
    expected = f"hooked {name} done\nTrue\n" if hooked else "False\n"
    assert (got.stdout, got.stderr) == (expected, "")


def test_the_finder_leaves_when_nothing_is_waited_for(stage: Stage) -> None:
    count = "print(sum(type(finder).__module__.startswith('mooring.autoload.post') for finder in sys.meta_path))"
    got = stage.run(f"import sys\n{count}\nimport {', '.join(HOOKED)}\n{count}")
    assert got.stdout.splitlines()[0] == "1"
    assert got.stdout.splitlines()[-1] == "0"
    assert got.stdout.count("hooked") == len(HOOKED)


def test_a_hooked_module_looks_as_if_nothing_had_been_there(stage: Stage) -> None:
    code = """if True:
        import importlib.util, inspect, pkgutil
        before = importlib.util.find_spec("transformers.trainer")
        assert before.loader.get_source("transformers.trainer").startswith("DONE")
        import transformers.trainer as trainer
        print(type(trainer.__loader__).__name__, type(trainer.__spec__.loader).__name__)
        print(inspect.getsource(trainer).splitlines()[0], pkgutil.get_data("transformers.trainer", "trainer.py")[:4])
    """
    got = stage.run(code)
    expected = "hooked transformers.trainer done\nSourceFileLoader SourceFileLoader\nDONE = 'late' b'DONE'\n"
    assert (got.stdout, got.stderr) == (expected, "")


def test_a_module_that_fails_to_import_fails_as_ever_and_is_hooked_when_it_succeeds(stage: Stage) -> None:
    write(
        stage.frameworks / "transformers" / "trainer.py", "import os\nif 'FAIL' in os.environ: 1 / 0\nDONE = 'done'\n"
    )
    code = """if True:
        import os, sys
        os.environ["FAIL"] = "1"
        for _ in range(2):
            try:
                import transformers.trainer
            except ZeroDivisionError:
                print("failed", "transformers.trainer" in sys.modules)
        del os.environ["FAIL"]
        import transformers.trainer
    """
    got = stage.run(code)
    assert (got.stdout, got.stderr) == ("failed False\n" * 2 + "hooked transformers.trainer done\n", "")


def test_a_framework_that_is_not_installed_is_missing_as_ever(stage: Stage) -> None:
    shutil.rmtree(stage.frameworks / "accelerate")
    code = "try:\n    import accelerate.accelerator\nexcept ModuleNotFoundError as error: print(error.name)"
    got = stage.run(f"import sys; sys.modules['accelerate'] = sys\n{code}")
    assert (got.stdout, got.stderr) == ("accelerate.accelerator\n", "")


def test_a_reloaded_module_stays_as_it_is(stage: Stage) -> None:
    got = stage.run("import importlib, transformers.trainer as t; print(importlib.reload(t).DONE)")
    assert (got.stdout, got.stderr) == ("hooked transformers.trainer done\ndone\n", "")


def test_a_module_that_was_imported_before_is_hooked_at_once(stage: Stage) -> None:
    code = """if True:
        import transformers.trainer
        from mooring.autoload.post_import import after_import
        after_import("transformers.trainer", "it is", lambda module: print("again", module.DONE))
        after_import("accelerate.accelerator", "it is", lambda module: print("both", module.DONE))
        import accelerate.accelerator
    """
    expected = ["hooked transformers.trainer done", "again done", "hooked accelerate.accelerator done", "both done"]
    assert stage.run(code).stdout.splitlines() == expected


def test_an_integration_that_fails_costs_one_warning_and_nothing_else(stage: Stage) -> None:
    text = "def autoload(module):\n    raise AttributeError('no such\\nthing')\n"
    write(stage.injected / "mooring" / "integrations" / "hugging_face.py", text)
    got = stage.run("import transformers.trainer, accelerate.accelerator; print(transformers.trainer.DONE)")
    assert got.stdout == "hooked accelerate.accelerator done\ndone\n"
    assert got.stderr == "mooring: transformers.Trainer is not protected: AttributeError: no such thing\n"
    assert got.returncode == 0


def test_a_client_that_cannot_be_imported_is_off_with_one_warning(stage: Stage) -> None:
    write(stage.injected / "mooring" / "__init__.py", "import grpc_that_nobody_has\n")
    got = stage.run("import transformers.trainer, accelerate.accelerator; print(transformers.trainer.DONE)")
    assert (got.stdout, got.returncode) == ("done\n", 0)
    assert got.stderr.count("\n") == 1
    assert got.stderr.startswith(
        "mooring: autoload is off, the package mooring cannot be imported: ModuleNotFoundError"
    )


@pytest.mark.parametrize("damage", ["", "1 / 0\n", "def begin():\n"])
def test_a_damaged_autoload_is_off_with_one_warning_and_hides_nothing(
    stage: Stage, tmp_path: Path, damage: str
) -> None:
    file = stage.injected / "mooring" / "autoload" / "zero_code.py"
    file.write_text(damage) if damage else file.unlink()
    write(tmp_path / "theirs" / "sitecustomize.py", "print('theirs')\n")
    staged = Stage(injected=stage.injected, frameworks=stage.frameworks, more=(tmp_path / "theirs",))
    got = staged.run("import transformers.trainer; print(transformers.trainer.DONE)")
    assert (got.stdout, got.returncode) == ("theirs\ndone\n", 0)
    assert got.stderr.startswith("mooring: autoload is off: ")
    assert got.stderr.count("\n") == 1


def test_an_autoload_of_another_version_leaves_the_package_its_own_table(stage: Stage) -> None:
    file = stage.injected / "mooring" / "autoload" / "zero_code.py"
    file.write_text(file.read_text().replace("TRAINERS", "OTHER_NAME"))
    package = str(Path(autoload.__file__).parents[2])
    got = stage.run(f"import sys; sys.path.insert(0, {package!r}); import mooring; print(mooring.protect)")
    assert got.stdout.startswith("<function protect"), got.stderr
    assert got.returncode == 0


def test_a_program_without_stderr_is_not_broken_by_a_warning(stage: Stage) -> None:
    write(stage.injected / "mooring" / "__init__.py", "1 / 0\n")
    code = f"exec {sys.executable} -c 'import transformers.trainer; print(transformers.trainer.DONE)' 2>&-"
    environment = {**os.environ, "PYTHONPATH": f"{stage.injected}:{stage.frameworks}"}
    got = subprocess.run(["sh", "-c", code], env=environment, stdout=subprocess.PIPE, timeout=100, check=False)
    assert (got.stdout, got.returncode) == (b"done\n", 0)


@pytest.mark.parametrize("flag", ["-E", "-I", "-S"])
def test_pythons_own_switches_turn_it_off(flag: str) -> None:
    code = "import sys; print(any('autoload' in name for name in sys.modules))"
    assert run(flag, "-c", code, path=(autoload.path(),)).stdout == "False\n"


def test_its_own_switch_turns_it_off_and_the_hidden_sitecustomize_runs(stage: Stage, tmp_path: Path) -> None:
    write(tmp_path / "theirs" / "sitecustomize.py", "print('theirs')\n")
    staged = Stage(injected=stage.injected, frameworks=stage.frameworks, more=(tmp_path / "theirs",))
    got = staged.run("import transformers.trainer", MOORING_AUTOLOAD="0")
    assert (got.stdout, got.stderr) == ("theirs\n", "")
    assert staged.run("import transformers.trainer").stdout == "theirs\nhooked transformers.trainer done\n"


THEIRS: dict[str, Callable[[Path, str], Path]] = {
    "module": lambda folder, text: write(folder / "sitecustomize.py", text),
    "package": lambda folder, text: write(folder / "sitecustomize" / "__init__.py", text),
}


@pytest.mark.parametrize("kind", THEIRS)
@pytest.mark.parametrize(
    "text",
    [
        "import sys\nsys.theirs = __name__\nsys.path.append('/added')\n",
        "raise RuntimeError('theirs is broken')\n",
        "import missing_thing\n",
        "import sitecustomize.part\n",
        "def broken(:\n",
    ],
    ids=["good", "raises", "misses-an-import", "imports-itself", "syntax-error"],
)
def test_the_hidden_sitecustomize_does_and_says_what_it_did_without_us(
    stage: Stage, tmp_path: Path, kind: str, text: str
) -> None:
    THEIRS[kind](tmp_path / "theirs", text)
    code = """if True:
        import sys
        theirs = sys.modules.get("sitecustomize")
        print(theirs and theirs.__file__, theirs and theirs.__spec__.name, getattr(sys, "theirs", None), sys.path[-1])
    """
    alone = run("-c", code, path=(tmp_path / "theirs",))
    got = run("-c", code, path=(stage.injected, tmp_path / "theirs"))
    assert (got.stdout, got.stderr, got.returncode) == (alone.stdout, alone.stderr, alone.returncode)
    hooked = run("-c", "import transformers.trainer", path=(stage.injected, tmp_path / "theirs", stage.frameworks))
    assert hooked.stdout == "hooked transformers.trainer done\n"


def test_the_sitecustomize_that_an_interpreter_has_of_its_own_runs_too(stage: Stage, tmp_path: Path) -> None:
    """Debian's in the standard library, or else that of a tool, behind PYTHONPATH: whichever Python itself takes."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True, timeout=100)
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


ANOTHER_HOOK = """if True:
    import importlib.util, sys
    class Loader:
        def __init__(self, loader): self.loader = loader
        def create_module(self, spec): return self.loader.create_module(spec)
        def exec_module(self, module):
            self.loader.exec_module(module)
            print("another", module.DONE)
    class Another:
        busy = False
        def find_spec(self, name, path=None, target=None):
            if name != "transformers.trainer" or self.busy: return None
            self.busy = True
            try:
                spec = importlib.util.find_spec(name)
                spec.loader = Loader(spec.loader)
                return spec
            finally:
                self.busy = False
    sys.meta_path.insert(PLACE, Another())
    import transformers.trainer
"""
"""As wrapt does it: it asks all finders from within one."""


@pytest.mark.parametrize("place", [0, 1])
def test_another_import_hook_for_the_same_module_works_beside_ours(stage: Stage, place: int) -> None:
    got = stage.run(ANOTHER_HOOK.replace("PLACE", str(place)))
    assert sorted(got.stdout.splitlines()) == ["another done", "hooked transformers.trainer done"]
    assert got.stderr == ""


def test_threads_that_import_at_the_same_time_see_it_hooked_once_and_complete(stage: Stage) -> None:
    slow = "import time\nfor _ in range(50): time.sleep(0)\nDONE = 'done'\n"
    write(stage.frameworks / "transformers" / "trainer.py", slow)
    code = """if True:
        import importlib, threading
        names = ["transformers.trainer", "accelerate.accelerator", "deepspeed.runtime.engine"] * 8
        start, seen = threading.Barrier(len(names)), []
        def load(name):
            start.wait()
            seen.append(importlib.import_module(name).DONE)
        threads = [threading.Thread(target=load, args=(name,)) for name in names]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        print(set(seen), len(seen))
    """
    got = stage.run(code)
    assert got.stdout.splitlines()[-1] == "{'done'} 24"
    assert got.stdout.count("hooked") == 3
    assert got.stderr == ""


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


def test_an_interpreter_without_mooring_takes_it_from_beside_autoload_and_nothing_else(
    stage: Stage, tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True, timeout=100)
    write(stage.injected / "mooring_api" / "__init__.py", "")
    write(stage.injected / "another_package" / "__init__.py", "")
    code = """if True:
        import importlib.util, transformers.trainer, mooring, mooring_api
        print(mooring.__file__)
        print(importlib.util.find_spec("another_package"))
    """
    folder = stage.injected / "mooring" / "autoload" / "path"
    python = str(tmp_path / "bare" / "bin" / "python")
    got = run("-c", code, path=(folder, stage.frameworks), python=python)
    expected = f"hooked transformers.trainer done\n{stage.injected / 'mooring' / '__init__.py'}\nNone\n"
    assert (got.stdout, got.stderr) == (expected, "")
