"""Each framework is hooked once, when its module is complete, as if nothing had been there."""

import shutil

import pytest
from tests.client.autoload.stage import HOOKED, Stage, write


@pytest.mark.parametrize("name", HOOKED)
def test_each_framework_is_hooked_once_its_module_is_complete(stage: Stage, name: str) -> None:
    got = stage.run(f"import {name}; import {name}; print('program')")
    assert (got.stdout, got.stderr) == (f"hooked {name} done\nprogram\n", "")


@pytest.mark.parametrize(("restore", "hooked"), [("lazy", True), ("whole", False), ("", False)])
def test_process_groups_are_hooked_for_lazy_restore_alone(stage: Stage, restore: str, hooked: bool) -> None:
    """Every process that imports torch imports that module."""
    name = "torch.distributed.distributed_c10d"
    got = stage.run(f"import {name}, sys; print('keepstep.integrations' in sys.modules)", KEEPSTEP_RESTORE=restore)
    expected = f"hooked {name} done\nTrue\n" if hooked else "False\n"
    assert (got.stdout, got.stderr) == (expected, "")


def test_the_finder_leaves_when_nothing_is_waited_for(stage: Stage) -> None:
    count = "print(sum(type(finder).__module__.startswith('keepstep.autoload.post') for finder in sys.meta_path))"
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
        from keepstep.autoload.post_import import after_import
        after_import("transformers.trainer", "it is", lambda module: print("again", module.DONE))
        after_import("accelerate.accelerator", "it is", lambda module: print("both", module.DONE))
        import accelerate.accelerator
    """
    expected = ["hooked transformers.trainer done", "again done", "hooked accelerate.accelerator done", "both done"]
    assert stage.run(code).stdout.splitlines() == expected


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
