"""The runner finds the process that has torch without autoload, says what hides it, and is not fooled by others."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from tests.client.autoload.fake_torch import write_program
from tests.client.autoload.stage import write
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS

from keepstep import autoload
from keepstep_agent.runtime.process.autoload_check import AutoloadCheck, UnprotectedProcess

OURS = str(autoload.path())
ENOUGH_LOOKS = 3

Start = Callable[..., AbstractContextManager[int]]


@pytest.fixture
def check(tmp_path: Path) -> AutoloadCheck:
    return begun(tmp_path)


def begun(tmp_path: Path, *command: str) -> AutoloadCheck:
    check = AutoloadCheck(tmp_path, folder=OURS, command=command)
    check.begin()
    return check


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Start a program and give its pid while it runs, from when it has said `ready`."""

    @contextmanager
    def started(
        check: AutoloadCheck,
        *switches: str,
        body: str = "import torch\nsay('ready')\nsys.stdin.read()\n",
        path: Sequence[str | Path] = (OURS,),
        command: Sequence[str] = (),
        **environment: str,
    ) -> Iterator[int]:
        program = write_program(tmp_path / "program.py", body)
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KEEPSTEP_"))}
        variables |= {"KEEPSTEP_AUTOLOAD_PROCESSES": check.file, **environment}
        if path:
            variables["PYTHONPATH"] = os.pathsep.join(map(str, path))
        process = subprocess.Popen(
            command or [sys.executable, *switches, str(program), "--token=secret"],
            env=variables,
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        with process:
            try:
                wait_until((tmp_path / "ready").exists, HANG_SECONDS, "the program has imported torch")
                yield process.pid
            finally:
                # A shell's programs too.
                os.killpg(process.pid, signal.SIGKILL)

    return started


def looks(check: AutoloadCheck, pid: int, count: int = ENOUGH_LOOKS) -> UnprotectedProcess | None:
    for _ in range(count):
        if process := check.look(pid):
            return process
    return None


@pytest.mark.parametrize(
    ("switches", "problem", "hint"),
    [
        (("-S",), "python -S ignores sitecustomize", "start Python without -S; or call keepstep.protect"),
        (("-I",), "python -I ignores PYTHONPATH", "start Python without -I; or call keepstep.protect"),
        (("-E",), "python -E ignores PYTHONPATH", "start Python without -E; or call keepstep.protect"),
        (("-X", "dev", "-uBE"), "python -E ignores PYTHONPATH", "start Python without -E; or"),
    ],
)
def test_a_switch_of_python_is_what_hides_autoload(
    check: AutoloadCheck, start: Start, tmp_path: Path, switches: tuple[str, ...], problem: str, hint: str
) -> None:
    with start(check, *switches) as pid:
        process = looks(check, pid)
    assert process is not None
    assert (process.pid, process.problem) == (pid, problem)
    assert process.hint.startswith(hint)
    assert process.command == " ".join([sys.executable, *switches, str(tmp_path / "program.py")])


@pytest.mark.parametrize("file", ["sitecustomize.py", "sitecustomize/__init__.py"])
def test_a_sitecustomize_that_comes_first_is_what_hides_autoload(
    check: AutoloadCheck, start: Start, tmp_path: Path, file: str
) -> None:
    write(tmp_path / "theirs" / file, "")
    with start(check, path=("/nowhere", tmp_path / "theirs", OURS)) as pid:
        process = looks(check, pid)
    assert process is not None
    assert process.problem == f"the sitecustomize of {tmp_path / 'theirs'} comes first on its PYTHONPATH"
    assert process.hint.startswith(f"put {OURS} first there; or")


def test_a_sitecustomize_in_the_working_directory_of_the_process_may_come_first(
    check: AutoloadCheck, start: Start, tmp_path: Path
) -> None:
    write(tmp_path / "sitecustomize.py", "")
    with start(check, path=("", OURS)) as pid:
        process = looks(check, pid)
    assert process is not None
    assert process.problem == "the sitecustomize of the working directory comes first on its PYTHONPATH"


@pytest.mark.parametrize(
    ("command", "tool", "program"),
    [
        (("/bin/tool", "python", "program.py"), "tool", "python"),
        (("tool", "--key", "secret", "python", "program.py"), "tool …", "python"),
        (("tool", "program.py"), "tool", "program.py"),
        (("python", "program.py"), "", ""),
        (("sh", "launch.sh", "program.py"), "", ""),
    ],
)
def test_the_hint_starts_keepstep_by_the_tool_that_starts_the_program(
    start: Start, tmp_path: Path, command: tuple[str, ...], tool: str, program: str
) -> None:
    write(tmp_path / "theirs" / "sitecustomize.py", "")
    named = [Path(sys.executable).name if word == "python" else word for word in command]
    check = begun(tmp_path, *named, "--token=secret")
    with start(check, path=(tmp_path / "theirs", OURS)) as pid:
        process = looks(check, pid)
    assert process is not None
    program = Path(sys.executable).name if program == "python" else program
    example = f"write {tool} before keepstep, as in: {tool} keepstep run --autoload --to DEST -- {program} …; or"
    assert process.hint.startswith(example if tool else f"put {OURS} first there; or")
    assert "secret" not in str(process)


@pytest.mark.parametrize(
    ("path", "problem"),
    [((), "its environment has no PYTHONPATH"), (("/elsewhere",), f"its PYTHONPATH lacks {OURS}")],
)
def test_an_environment_without_autoloads_folder_is_what_hides_it(
    check: AutoloadCheck, start: Start, path: tuple[str, ...], problem: str
) -> None:
    with start(check, path=path) as pid:
        process = looks(check, pid)
    assert process is not None
    assert process.problem == problem
    assert process.hint.startswith(f"put {OURS} first on its PYTHONPATH, and pass on all variables")


def test_autoload_that_is_first_and_did_not_begin_is_referred_to_its_own_line(
    check: AutoloadCheck, start: Start, tmp_path: Path
) -> None:
    with start(check) as pid:
        # As if it had failed before it noted itself.
        Path(check.file).write_text("")
        process = looks(check, pid)
    assert process is not None
    assert process.problem.startswith("Keepstep's sitecustomize comes first on its PYTHONPATH, but")


@pytest.mark.parametrize("is_separate", [True, False])
def test_code_on_the_command_line_is_not_shown(
    check: AutoloadCheck, start: Start, tmp_path: Path, is_separate: bool
) -> None:
    packages = str(tmp_path / "packages")
    code = f"import sys; sys.path.insert(0, {packages!r}); import torch; open('ready', 'w'); sys.stdin.read()"
    words = ["-Sc", code] if is_separate else [f"-Sc{code}"]
    with start(check, command=[sys.executable, *words, "secret"]) as pid:
        process = looks(check, pid)
    assert process is not None
    assert process.command == f"{sys.executable} -Sc"


def test_a_process_is_reported_at_the_third_look_that_finds_torch(check: AutoloadCheck, start: Start) -> None:
    """Another tool's sitecustomize may import torch before autoload begins."""
    with start(check, "-S") as pid:
        assert [check.look(pid) is not None for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("switches", [(), ("-P",), ("-s",)])
def test_a_process_in_which_autoload_is_active_is_not_reported(
    check: AutoloadCheck, start: Start, switches: tuple[str, ...]
) -> None:
    with start(check, *switches) as pid:
        assert looks(check, pid) is None


def test_a_process_that_wants_no_autoload_is_not_reported(check: AutoloadCheck, start: Start) -> None:
    with start(check, KEEPSTEP_AUTOLOAD="0") as pid:
        assert looks(check, pid) is None


def test_a_process_of_another_run_is_not_reported(check: AutoloadCheck, start: Start, tmp_path: Path) -> None:
    with start(check, KEEPSTEP_AUTOLOAD_PROCESSES=str(tmp_path / "another-volume")) as pid:
        assert looks(check, pid) is None


def test_a_process_without_torch_is_not_reported(check: AutoloadCheck, start: Start) -> None:
    with start(check, "-S", body="say('ready')\nsys.stdin.read()\n") as pid:
        assert looks(check, pid) is None


def test_a_fork_of_a_process_in_which_autoload_is_active_is_not_reported(check: AutoloadCheck, start: Start) -> None:
    body = "import torch\nif os.fork() == 0:\n    say('ready')\nsys.stdin.read()\n"
    with start(check, body=body) as pid:
        (child,) = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        assert b"libtorch_python" in Path(f"/proc/{child}/maps").read_bytes()
        assert looks(check, pid) is None
        assert looks(check, child) is None


def test_a_tool_with_autoload_does_not_speak_for_the_program_that_it_becomes(
    check: AutoloadCheck, start: Start
) -> None:
    body = """if True:
        import torch
        if sys.flags.no_site:
            say("ready")
            sys.stdin.read()
        os.execv(sys.executable, [sys.executable, "-S", *sys.argv])
    """
    with start(check, body=body) as pid:
        process = looks(check, pid)
    assert process is not None
    assert (process.pid, process.problem) == (pid, "python -S ignores sitecustomize")


def test_a_launcher_with_autoload_does_not_speak_for_its_ranks(check: AutoloadCheck, start: Start) -> None:
    body = """if True:
        import torch, subprocess, threading
        if sys.flags.no_site:
            say("ready")
            sys.stdin.read()
        start = lambda: subprocess.run([sys.executable, "-S", *sys.argv])
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
    """
    with start(check, body=body) as pid:
        process = looks(check, pid)
    assert process is not None
    assert process.problem == "python -S ignores sitecustomize"
    assert process.pid != pid


def test_a_program_that_starts_long_after_its_shell_is_found(
    check: AutoloadCheck, start: Start, tmp_path: Path
) -> None:
    program = write_program(tmp_path / "trainer.py", "import torch\nsay('trains')\nsys.stdin.read()\n")
    script = f"touch ready; read line; '{sys.executable}' -S {program}; true"
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with start(check, command=["sh", "-c", f"exec 0<>{fifo}; {script}"]) as pid:
        assert looks(check, pid, 400) is None
        fifo.write_text("go\n")
        wait_until((tmp_path / "trains").exists, HANG_SECONDS, "the trainer has imported torch")
        process = looks(check, pid)
    assert process is not None
    assert process.problem == "python -S ignores sitecustomize"


def test_a_process_is_examined_for_its_first_looks_alone(check: AutoloadCheck, start: Start, tmp_path: Path) -> None:
    body = "say('ready')\nwait_for('go')\nimport torch\nsay('trains')\nsys.stdin.read()\n"
    with start(check, "-S", body=body) as pid:
        assert looks(check, pid, 300) is None
        (tmp_path / "go").touch()
        wait_until((tmp_path / "trains").exists, HANG_SECONDS, "the program has imported torch")
        assert looks(check, pid) is None
        assert looks(begun(tmp_path), pid) is not None


def test_a_list_that_is_gone_or_too_large_ends_the_looks(check: AutoloadCheck, start: Start) -> None:
    with start(check, "-S") as pid:
        os.truncate(check.file, 2 * 1024 * 1024)
        with pytest.raises(OSError, match="more than"):
            check.look(pid)
        Path(check.file).unlink()
        with pytest.raises(FileNotFoundError):
            check.look(pid)


def test_lines_that_make_no_sense_are_passed_over(check: AutoloadCheck, start: Start) -> None:
    with start(check, "-S") as pid:
        Path(check.file).write_bytes(b"\n1 (python) R 1\n\xff)\n")
        assert looks(check, pid) is not None


def test_each_run_begins_with_an_empty_list_that_the_volumes_users_may_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    check = begun(tmp_path)
    Path(check.file).write_text("of an earlier run\n")
    check.begin()
    assert Path(check.file).stat().st_size == 0
    assert Path(check.file).stat().st_mode & 0o777 == 0o666


def test_a_program_that_has_ended_is_no_problem(check: AutoloadCheck) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(HANG_SECONDS)
    assert looks(check, process.pid) is None
