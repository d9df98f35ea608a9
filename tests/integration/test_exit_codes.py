"""Every way in which a run ends, and its exit code: walks the table of docs/running.md, row by row."""

import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.run_process import NOT_DURABLE, TRAINER, RunProcess

from keepstep_agent.adapters.output.program import lives

PAGE: Final = Path(__file__).parents[2] / "docs" / "running.md"
BEGINS: Final = "| how the run ends | code |\n|---|---|\n"
UNREACHABLE: Final[dict[str, Any]] = {"endpoint_url": "http://127.0.0.1:9", "restore": "off", "grace_seconds": 4}
TRAIN: Final = f"{sys.executable} {TRAINER}"
PASSES_ON: Final = "kill -TERM $rank; wait $rank"

# Each scenario starts a run, does to it what the row says, and does not wait for its end.
Scenario = Callable[["Scene"], None]
SCENARIOS: dict[str, Scenario] = {}


class Scene:
    """One run in a folder of its own. Processes write their ids into files there, to be found by."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.listener = socket.socket()
        self.run: RunProcess

    def start(
        self, *command: str, destination: str = "", trainer: dict[str, object] | None = None, **options: Any
    ) -> None:
        options = {"grace_seconds": 600, **options, **({"command": command} if command else {})}
        ids = {"RANK_ID": self.folder / "rank", "LAUNCHER_ID": self.folder / "launcher"}
        destination = destination or f"file://{self.folder}/store"
        volume = self.folder / "volume"
        self.run = RunProcess(volume, destination, trainer={**ids, **(trainer or {})}, **options)
        self.run.__enter__()

    def launch(self, *, train: str = TRAIN, told: str = PASSES_ON, end: str = "exit 1", **options: Any) -> None:
        """Start the trainer by a launcher in bash: `told` is what it does with a SIGTERM, `end` how it ends."""
        launcher = (
            f"echo $$ > $LAUNCHER_ID; {train} & rank=$!; echo $rank > $RANK_ID; trap '{told}; {end}' TERM; "
            f"wait $rank; {end}"
        )
        self.start("bash", "-c", launcher, **options)

    def watch(self, *lines: str) -> None:
        """Start a program that knows nothing of Keepstep, has written a file into its output, and does these lines."""
        out = self.folder / "out"
        out.mkdir()
        wrote = f"pathlib.Path({str(out)!r}, 'state.bin').write_bytes(bytes(1000)); print('ready', flush=True)"
        program = "\n".join(("import pathlib, signal, sys, time", *lines[:-1], wrote, lines[-1]))
        self.start(sys.executable, "-c", program, watch=out)
        self.wait_for("ready\n")
        self.wait_for("checkpoint.committed")

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.run.output(), HANG_SECONDS, text)

    def tell(self, who: str, number: signal.Signals = signal.SIGTERM) -> None:
        os.kill(int((self.folder / who).read_text()), number)

    def close(self) -> None:
        self.listener.close()
        if hasattr(self, "run"):
            self.run.__exit__()
        with suppress(FileNotFoundError, ProcessLookupError):
            self.tell("rank", signal.SIGKILL)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    try:
        yield scene
    finally:
        scene.close()


def row(how: str) -> Callable[[Scenario], Scenario]:
    def add(scenario: Scenario) -> Scenario:
        SCENARIOS[how] = scenario
        return scenario

    return add


@row("the program ends by itself with 0, and all is stored")
def _(scene: Scene) -> None:
    scene.start(trainer={"STEPS": 3})


@row("the program ends by itself with 0, and the store does not take its last checkpoint")
def _(scene: Scene) -> None:
    scene.start(destination="s3://bucket/run", trainer={"STEPS": 3}, **UNREACHABLE)


@row("the program ends by itself with 0, and nothing was ever stored")
def _(scene: Scene) -> None:
    scene.start("true")


@row("the program fails by itself with 3")
def _(scene: Scene) -> None:
    scene.start(trainer={"STEPS": 3, "EXIT_CODE": 3})


@row("`run` is told before the program begins")
def _(scene: Scene) -> None:
    # A store that takes connections and never answers.
    scene.listener.bind(("127.0.0.1", 0))
    scene.listener.listen()
    endpoint_url = f"http://127.0.0.1:{scene.listener.getsockname()[1]}"
    scene.start("sleep", "600", destination="s3://bucket/run", endpoint_url=endpoint_url)
    is_restoring = lambda: any(" restore " in line for line in scene.run.children().values())  # noqa: E731
    wait_until(is_restoring, HANG_SECONDS, "it restores")
    scene.run.signal(signal.SIGTERM)


@row("`run` is told, and the trainer's just-in-time save is stored")
def _(scene: Scene) -> None:
    scene.start()
    scene.run.wait_steps(2)
    scene.run.signal(signal.SIGTERM)


@row("`run` is told, and a launcher ends with 1 after its trainer's just-in-time save")
def _(scene: Scene) -> None:
    scene.launch()
    scene.run.wait_steps(2)
    scene.run.signal(signal.SIGTERM)


@row("`run` is told, and a wrapper script ends with 0 after its trainer's just-in-time save")
def _(scene: Scene) -> None:
    scene.launch(end="exit 0")
    scene.run.wait_steps(2)
    scene.run.signal(signal.SIGTERM)


@row("`run` is told, and a launcher dies before its trainer has saved")
def _(scene: Scene) -> None:
    # A slow step: the launcher is long gone when the trainer saves.
    scene.launch(told="exit 1", trainer={"STEP_SECONDS": 3.0})
    scene.run.wait_steps(1)
    scene.run.signal(signal.SIGTERM)


@row("`run` is told, and the trainer makes its last step and its final save")
def _(scene: Scene) -> None:
    scene.start(trainer={"STEPS": 2, "STEP_SECONDS": 3.0})
    scene.run.wait_steps(1)
    scene.run.signal(signal.SIGTERM)


@row("`run` is told, and the trainer dies before it has saved")
def _(scene: Scene) -> None:
    scene.launch(told="kill -KILL $rank")
    scene.run.wait_steps(2)
    # Before it can save.
    scene.tell("rank", signal.SIGSTOP)
    scene.run.signal(signal.SIGTERM)


def test_steps_that_nobody_told_any_more_before_a_trainer_died_are_not_taken_for_stored(scene: Scene) -> None:
    """It saves every fourth step, and tells its step once a second."""
    scene.launch(told="kill -KILL $rank", trainer={"STEP_SECONDS": 0.03, "EVERY": 4})
    scene.run.wait_steps(40)
    # Before it comes to save just in time.
    scene.tell("rank", signal.SIGSTOP)
    scene.run.signal(signal.SIGTERM)
    code, last = scene.run.wait(), scene.run.steps()[-1][0]
    # It may just have saved, and written down the step before.
    assert code == 75 or (code == 143 and last % 4 in (0, 3)), scene.run.output()


@row("`run` is told, and the trainer's save fails twice, as on a full volume")
def _(scene: Scene) -> None:
    scene.start("bash", "-c", f"ulimit -f 20; exec {TRAIN}")
    scene.run.wait_steps(2)
    scene.run.signal(signal.SIGTERM)


@row("`run` is told, and the store does not take the just-in-time save in the grace period")
def _(scene: Scene) -> None:
    scene.start(destination="s3://bucket/run", **UNREACHABLE)
    scene.run.wait_steps(2)
    scene.run.signal(signal.SIGTERM)


@row("`run` is told, and nothing was ever stored")
def _(scene: Scene) -> None:
    scene.start("sh", "-c", "echo ready; exec sleep 600")
    scene.wait_for("ready\n")
    scene.run.signal(signal.SIGTERM)


@row("`run` is told, and a program that is only watched ends, all its files whole")
def _(scene: Scene) -> None:
    scene.watch("time.sleep(600)")
    scene.run.signal(signal.SIGTERM)


@row("`run` is told, and a program that is only watched ends with 0, all its files whole")
def _(scene: Scene) -> None:
    scene.watch("signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))", "time.sleep(600)")
    scene.run.signal(signal.SIGTERM)


@row("only the trainer is told, and its launcher ends with 1")
def _(scene: Scene) -> None:
    scene.launch()
    scene.run.wait_steps(2)
    scene.tell("rank")


@row("only the trainer is told, its save fails twice, and its launcher ends with 1")
def _(scene: Scene) -> None:
    scene.launch(train=f"bash -c 'ulimit -f 20; exec {TRAIN}'")
    scene.run.wait_steps(2)
    scene.tell("rank")


@row("only the launcher is told, and it passes that on and ends with 1")
def _(scene: Scene) -> None:
    scene.launch()
    scene.run.wait_steps(2)
    scene.tell("launcher")


@row("the launcher is killed, and its trainer saves when the agent asks it to")
def _(scene: Scene) -> None:
    scene.launch()
    scene.run.wait_steps(2)
    scene.tell("launcher", signal.SIGKILL)


@row("the trainer is killed, and its launcher ends with 1")
def _(scene: Scene) -> None:
    scene.launch()
    scene.run.wait_steps(2)
    scene.tell("rank", signal.SIGKILL)


@row("`run` is killed, and the trainer saves when the agent asks it to")
def _(scene: Scene) -> None:
    scene.start(trainer={"STEP_SECONDS": 0.5})
    scene.run.wait_steps(1)
    agent_id = scene.run.agent_pid()
    scene.run.signal(signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{agent_id}").exists(), HANG_SECONDS, "the agent has left")
    assert "just-in-time" in scene.run.output()


IN_A_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
terminal = os.open(sys.argv[1], os.O_RDWR)
fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
for descriptor in (0, 1, 2):
    os.dup2(terminal, descriptor)
os.execvp(sys.argv[2], sys.argv[2:])
"""


@row("the terminal of `run` closes, and the trainer's just-in-time save is stored")
def _(scene: Scene) -> None:
    keyboard, other_end = os.openpty()
    prefix = (sys.executable, "-c", IN_A_TERMINAL, os.ttyname(other_end))
    scene.start(prefix=prefix, trainer={"STEP_SECONDS": 0.2})
    os.close(other_end)
    scene.run.wait_steps(2)
    os.close(keyboard)


def table() -> dict[str, int]:
    lines = PAGE.read_text().split(BEGINS)[1].partition("\n\n")[0].splitlines()
    cells = [re.fullmatch(r"\| (.*) \| (\d+) \|", line) for line in lines]
    return {found[1]: int(found[2]) for found in cells if found is not None}


def test_the_table_and_the_scenarios_are_the_same() -> None:
    assert sorted(table()) == sorted(SCENARIOS)


@pytest.mark.parametrize("how", SCENARIOS)
def test_a_run_ends_with_the_code_that_the_page_says(scene: Scene, how: str) -> None:
    SCENARIOS[how](scene)
    code = scene.run.wait()
    code = code if code >= 0 else 128 - code
    assert code == table()[how], scene.run.output()
    assert code != NOT_DURABLE or "keepstep: not durable: " in scene.run.output(), "what fails says so"


@pytest.mark.parametrize("told", ["the launcher", "the launcher and its process"])
def test_what_a_dead_launcher_has_left_behind_is_waited_for_and_stored(scene: Scene, told: str) -> None:
    """It knows nothing of Keepstep, and saves once its launcher is gone."""
    last = scene.folder / "out" / "last.bin"
    scene.watch(
        "import os",
        "launcher = os.getpid()",
        "if not os.fork():",
        "    told = []",
        "    signal.signal(signal.SIGTERM, lambda *_: told.append(True))",
        f"    pathlib.Path({str(scene.folder / 'rank')!r}).write_text(str(os.getpid()))",
        "    while os.getppid() == launcher: time.sleep(0.05)",
        "    time.sleep(2)  # for as long as its save takes",
        f"    pathlib.Path({str(last)!r}).write_bytes(bytes(1000))",
        "    os._exit(0)",
        "time.sleep(600)",
    )
    if told == "the launcher":
        scene.run.signal(signal.SIGTERM)
    else:
        # As Slurm does it: all processes at once, so the launcher is dead before the run knows why.
        launcher_id = next(pid for pid, line in scene.run.children().items() if " -c " in line)
        scene.run.signal(signal.SIGSTOP)
        for process_id in (int((scene.folder / "rank").read_text()), launcher_id, scene.run.process.pid):
            os.kill(process_id, signal.SIGTERM)
        wait_until(lambda: not lives(launcher_id), HANG_SECONDS, "the launcher has ended")
        scene.run.signal(signal.SIGCONT)
    assert scene.run.wait() == 143, scene.run.output()
    assert list(scene.folder.glob("store/**/last.bin")), scene.run.output()


def test_a_helper_that_ends_well_after_its_program_was_killed_hides_no_torn_file(scene: Scene) -> None:
    """As the helpers of loggers do: the file that the program was writing is as old as its end by then."""
    torn = scene.folder / "out" / "torn.bin"
    scene.watch(
        "import os",
        "launcher = os.getpid()",
        "if not os.fork():",
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "    while os.getppid() == launcher: time.sleep(0.05)",
        "    time.sleep(4)  # longer than a file must be quiet to be whole",
        "    os._exit(0)",
        "def die_in_a_save(*_):",
        f"    pathlib.Path({str(torn)!r}).write_bytes(bytes(1000))",
        "    os.kill(os.getpid(), signal.SIGKILL)",
        "signal.signal(signal.SIGTERM, die_in_a_save)",
        "time.sleep(600)",
    )
    scene.run.signal(signal.SIGTERM)
    assert scene.run.wait() == 75, scene.run.output()
    assert "torn.bin: it was being written to" in scene.run.output()
