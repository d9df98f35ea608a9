"""DataLoader workers and DCP's writer process when their trainer's process group gets a signal; with the real torch."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.lanes import nightly
from tests.servers.process import free_port

from keepstep import autoload
from keepstep.workers import worker_processes

PROGRAM = Path(__file__).with_name("worker_program.py")


class Program:
    """The leader of its process group, as a rank is under torchrun; with `ranks`, torchrun itself."""

    def __init__(self, *arguments: str, autoloaded: bool = False, ranks: int = 0) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if autoloaded:
            environment["PYTHONPATH"] = str(autoload.path())
        launcher: list[str] = []
        if ranks:
            # As the injection does; else torchrun kills its ranks 30 seconds after it has passed on its SIGTERM.
            environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(int(HANG_SECONDS))
            launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1"]
            launcher.append(f"--master-port={free_port()}")
        self.process = subprocess.Popen(
            [sys.executable, *launcher, str(PROGRAM), *arguments],
            env=environment,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.children: list[int] = []

    def wait_children(self) -> list[int]:
        """The workers' pids, once they are at work."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("children "):
                pids = [int(word) for word in line.split()[1:]]
                self.children += pids
                return pids
        raise AssertionError(self.process.communicate(timeout=HANG_SECONDS)[1])

    def signal_group(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def end(self) -> tuple[int, list[str], str]:
        """Exit code, further lines, stderr.

        But for Python's resource tracker: of a semaphore that is removed while the interpreter ends it is told in two
        steps, and seldom of the second one.
        """
        output, said = self.process.communicate(timeout=HANG_SECONDS)
        errors = "".join(line for line in said.splitlines(keepends=True) if "resource_tracker" not in line)
        return self.process.returncode, output.split(), errors


@contextmanager
def program(*arguments: str, autoloaded: bool = False, ranks: int = 0) -> Iterator[Program]:
    pytest.importorskip("torch")
    started = Program(*arguments, autoloaded=autoloaded, ranks=ranks)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            # torchrun's ranks have groups of their own, which it ends after its own SIGTERM.
            started.signal_group(signal.SIGTERM if ranks else signal.SIGKILL)
        started.process.communicate(timeout=HANG_SECONDS)
        for pid in started.children:
            if lives(pid):
                os.kill(pid, signal.SIGKILL)


def lives(pid: int) -> bool:
    """Not a zombie either: whoever inherits an orphan may be slow to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(lives, pids)), HANG_SECONDS, f"{pids} are gone")


@pytest.mark.parametrize(
    ("method", "install"),
    [
        ("fork", "before-torch"),
        ("fork", "after-torch"),
        pytest.param("spawn", "after-torch", marks=pytest.mark.nightly),
        ("forkserver", "after-torch"),
    ],
)
def test_a_loaders_workers_deliver_after_the_groups_sigterm(method: str, install: str) -> None:
    with program("load", "--method", method, "--install", install) as started:
        workers = started.wait_children()
        started.signal_group(signal.SIGTERM)
        assert started.end() == (0, ["stopping", "done"], "")
        assert not any(map(lives, workers))


@pytest.mark.parametrize("method", ["fork", *nightly("forkserver")])
def test_with_autoload_they_do_so_with_no_code_at_all(method: str) -> None:
    with program("load", "--method", method, autoloaded=True) as started:
        started.wait_children()
        started.signal_group(signal.SIGTERM)
        assert started.end() == (0, ["stopping", "done"], "")


@pytest.mark.nightly
def test_under_torchrun_the_workers_of_all_ranks_deliver_after_its_sigterm() -> None:
    with program("load", autoloaded=True, ranks=2) as started:
        workers = started.wait_children() + started.wait_children()
        started.process.send_signal(signal.SIGTERM)
        _, lines, errors = started.end()
        assert sorted(lines) == ["done", "done", "stopping", "stopping"], errors
        wait_gone(workers)


def test_without_it_the_groups_sigterm_takes_the_workers_away() -> None:
    with program("load") as started:
        started.wait_children()
        started.signal_group(signal.SIGTERM)
        code, lines, _ = started.end()
        # How torch says so depends on what the main process was doing.
        assert code != 0
        assert "done" not in lines


@pytest.mark.parametrize(
    "how", [("fork",), ("fork", "--busy"), *nightly(("spawn", "--busy"), ("forkserver", "--busy"))], ids=" ".join
)
def test_workers_die_with_a_parent_that_is_killed(how: tuple[str, ...]) -> None:
    with program("load", "--install", "after-torch", "--method", *how) as started:
        workers = started.wait_children()
        assert all(map(lives, workers))
        os.kill(started.process.pid, signal.SIGKILL)
        wait_gone(workers)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_obeys_its_own_sigterm(method: str) -> None:
    with program("load", "--method", method, "--install", "after-torch", "--busy") as started:
        workers = started.wait_children()
        os.kill(workers[0], signal.SIGTERM)
        wait_gone(workers[:1])
        started.process.send_signal(signal.SIGTERM)
        assert started.end()[0] != 0


def test_a_second_just_in_time_sigterm_does_not_reach_them_either() -> None:
    with program("load", "--install", "after-torch") as started:
        started.wait_children()
        for _ in range(20):
            started.signal_group(signal.SIGTERM)
        assert started.end() == (0, ["stopping", "done"], "")


@pytest.mark.parametrize(
    ("early", "autoloaded"), [((), False), (("--early",), True)], ids=["writing, installed", "starting, autoload"]
)
def test_the_checkpoint_writer_finishes_after_the_groups_sigterm(
    tmp_path: Path, early: tuple[str, ...], autoloaded: bool
) -> None:
    install = () if autoloaded else ("--install", "after-torch")
    with program("write", "--folder", str(tmp_path), *install, *early, autoloaded=autoloaded) as started:
        writer = started.wait_children()
        started.signal_group(signal.SIGTERM)
        code, lines, errors = started.end()
        assert (code, lines[-1]) == (0, "done"), errors
        wait_gone(writer)


def test_without_it_the_groups_sigterm_takes_the_checkpoint_writer_away(tmp_path: Path) -> None:
    with program("write", "--folder", str(tmp_path)) as started:
        started.wait_children()
        started.signal_group(signal.SIGTERM)
        code, lines, _ = started.end()
        assert code != 0
        assert "done" not in lines


def test_the_checkpoint_writer_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    with program("write", "--folder", str(tmp_path), "--install", "after-torch") as started:
        writer = started.wait_children()
        assert all(map(lives, writer))
        os.kill(started.process.pid, signal.SIGKILL)
        wait_gone(writer)


def test_the_checkpoint_writer_obeys_its_own_sigterm(tmp_path: Path) -> None:
    with program("write", "--folder", str(tmp_path), "--install", "after-torch") as started:
        writer = started.wait_children()
        os.kill(writer[0], signal.SIGTERM)
        wait_gone(writer)
        started.process.send_signal(signal.SIGTERM)
        code, lines, _ = started.end()
        assert code != 0
        assert "done" not in lines


def test_a_torch_that_has_changed_costs_one_warning() -> None:
    code = """if True:
        import sys, types
        from keepstep.workers import worker_processes
        module = sys.modules["torch.utils.data._utils.worker"] = types.ModuleType("torch.utils.data._utils.worker")
        for parent in ("torch", "torch.utils", "torch.utils.data", "torch.utils.data._utils"):
            sys.modules[parent] = types.ModuleType(parent)
        worker_processes.install()
        worker_processes.install()
        print("program")
    """
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert got.stdout == "program\n"
    assert got.stderr.startswith("keepstep: DataLoader workers are not protected: AttributeError: ")
    assert got.stderr.count("\n") == 1


def test_nothing_of_torch_is_imported_for_it() -> None:
    code = "import sys; from keepstep.workers import worker_processes as w; w.install(); print('torch' in sys.modules)"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert (got.stdout, got.stderr) == ("False\n", "")


def test_a_worker_finds_its_entry_by_name() -> None:
    for entry in (worker_processes.loader_worker, worker_processes.checkpoint_writer):
        assert getattr(sys.modules[entry.__module__], entry.__qualname__) is entry


def test_other_children_of_the_fork_server_obey_sigterm_and_it_goes_with_the_program() -> None:
    code = """if True:
        import multiprocessing, multiprocessing.forkserver, os, signal, time
        from keepstep.workers import fork_server
        fork_server.keep_alive()
        fork_server.keep_alive()
        context = multiprocessing.get_context("forkserver")
        children = [context.Process(target=time.sleep, args=(3600,)) for _ in range(2)]
        children[0].start()
        server = multiprocessing.forkserver._forkserver._forkserver_pid
        os.kill(server, signal.SIGTERM)
        children[1].start()
        for child in children:
            child.terminate()
            child.join()
        print(server, *(child.exitcode for child in children))
    """
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_SECONDS)
    server, *codes = map(int, got.stdout.split())
    assert (codes, got.stderr) == ([-signal.SIGTERM] * 2, "")
    wait_gone([server])
