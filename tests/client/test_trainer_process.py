"""Real training processes: signalled, killed, forking, out of disk."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.client.agent_server import AgentServer
from tests.client.conftest import Trainer
from tests.harness.bounds import HANG_SECONDS
from tests.harness.small_volume import mounted

from keepstep_api import names

Start = Callable[..., Trainer]
ROOT = Path(__file__).parents[2]
IN_A_POD = {"KEEPSTEP_START": "container"}
KILLED_REPLACEMENT = Path(__file__).with_name("killed_replacement.py")


def run(*command: str, directory: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )


def test_sigterm_saves_at_that_very_step_and_leaves_with_143(start_trainer: Start, volume: Path) -> None:
    trainer = start_trainer()
    assert trainer.line() == "begin 0"
    for step in (1, 2, 3):
        trainer.step()
        assert trainer.line() == f"step {step}"
    trainer.process.send_signal(signal.SIGTERM)
    trainer.step()
    assert trainer.line() == "step 4"
    code, errors = trainer.end()
    assert code == names.JUST_IN_TIME_EXIT_CODE
    assert "Traceback" not in errors
    record = json.loads((volume / ".keepstep/records/checkpoint-4.json").read_text())
    assert (record["step"], record["kind"]) == (4, "just-in-time")

    again = start_trainer()
    assert again.line() == "begin 4"


@pytest.mark.parametrize(
    ("number", "environment"),
    [
        (signal.SIGHUP, {}),
        (signal.SIGHUP, {"KEEPSTEP_START": "container"}),
        (signal.SIGINT, {"KEEPSTEP_START": "container"}),
    ],
)
def test_other_signals_that_would_end_it_have_it_save_too(
    start_trainer: Start, volume: Path, number: signal.Signals, environment: dict[str, str]
) -> None:
    trainer = start_trainer(**environment)
    assert trainer.line() == "begin 0"
    trainer.process.send_signal(number)
    trainer.step()
    code, errors = trainer.end()
    assert code == names.JUST_IN_TIME_EXIT_CODE, errors
    assert (volume / ".keepstep/records/checkpoint-1.json").exists()


def test_ctrl_c_interrupts_a_program_that_is_in_no_pod(start_trainer: Start, volume: Path) -> None:
    trainer = start_trainer()
    assert trainer.line() == "begin 0"
    trainer.process.send_signal(signal.SIGINT)
    code, errors = trainer.end()
    assert code == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
    assert not (volume / ".keepstep/records").exists()


def test_a_program_whose_output_nobody_reads_any_more_saves(start_trainer: Start, volume: Path) -> None:
    """As that of `… | tee log`, whose reader dies of the same signal."""
    trainer = start_trainer()
    assert trainer.line() == "begin 0"
    assert trainer.process.stdout is not None
    trainer.process.stdout.close()
    trainer.process.stdout = None
    trainer.process.send_signal(signal.SIGTERM)
    trainer.step()
    code, errors = trainer.end()
    assert code == names.JUST_IN_TIME_EXIT_CODE, errors
    assert (volume / ".keepstep/records/checkpoint-1.json").exists()


def test_a_program_whose_terminal_has_closed_saves(start_trainer: Start, volume: Path) -> None:
    keyboard, terminal = os.openpty()
    trainer = start_trainer(stdout=terminal)
    os.close(terminal)
    # A whole line: a terminal passes its text on before its end, and nobody could print that any more.
    with os.fdopen(keyboard, "rb") as lines:
        assert lines.readline().strip() == b"begin 0"
    trainer.process.send_signal(signal.SIGHUP)
    trainer.step()
    code, errors = trainer.end()
    assert code == names.JUST_IN_TIME_EXIT_CODE, errors
    assert (volume / ".keepstep/records/checkpoint-1.json").exists()


LEAVING = """
import atexit, os, signal, subprocess, sys
import keepstep
from keepstep.framework_run import FrameworkRun

class TheVeryEnd:
    # The interpreter has no handlers any more when it comes to what __main__ holds.
    def __del__(self, kill=os.kill, process=os.getpid(), number=signal.SIGTERM):
        kill(process, number)

def sigterm():
    os.kill(os.getpid(), signal.SIGTERM)

def at_exit():
    sigterm()
    forked = os.fork()
    if not forked:
        sigterm()
        os._exit(0)
    print("forked", -os.WTERMSIG(os.waitpid(forked, 0)[1]))
    print("started", subprocess.run(["sh", "-c", "kill -TERM $$"]).returncode, flush=True)

the_very_end = TheVeryEnd()
if sys.argv[1] == "checkpointer":
    saver = keepstep.Checkpointer()
    leave = saver.finish
    sigterm()
    assert saver.should_save(1)
    with saver.save(1) as directory:
        (directory / "state").touch()
else:
    saver = FrameworkRun.current()
    leave = saver.leave
atexit.register(at_exit)
# As a framework does that gives back what it found.
signal.signal(signal.SIGTERM, lambda *_: sys.exit("by a framework's handler"))
try:
    leave()
finally:
    sigterm()
    saver.close()
    sigterm()
"""


@pytest.mark.parametrize("saver", ["checkpointer", "framework"])
def test_on_the_way_out_a_further_sigterm_changes_nothing_and_children_obey_it(tmp_path: Path, saver: str) -> None:
    ended = run("-c", LEAVING, saver, directory=tmp_path)
    assert ended.returncode == names.JUST_IN_TIME_EXIT_CODE, ended.stderr
    assert ended.stdout.splitlines() == ["forked -15", "started -15"], ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_agent_hears_of_sigterm_and_of_the_just_in_time_checkpoint(
    start_trainer: Start, agent: AgentServer
) -> None:
    trainer = start_trainer()
    assert trainer.line() == "begin 0"
    trainer.process.send_signal(signal.SIGTERM)
    trainer.step()
    code, _ = trainer.end()
    assert code == names.JUST_IN_TIME_EXIT_CODE
    assert [method for method, _ in agent.calls] == ["Register", "NotifyTermination", "BeginSave", "AnnounceCheckpoint"]


def test_a_process_killed_while_it_saves_leaves_no_half_checkpoint(start_trainer: Start, volume: Path) -> None:
    first = start_trainer(EVERY="1")
    assert first.line() == "begin 0"
    first.step()
    assert first.line() == "step 1"
    first.kill()
    second = start_trainer(EVERY="1", HANG_IN_SAVE="1")
    assert second.line() == "begin 1"
    second.step()
    assert second.line() == "saving"
    second.kill()
    left = sorted(path.name for path in (volume / "checkpoints").iterdir())
    assert len(left) == 2
    assert left[0].startswith(".saving-")
    assert left[1] == "checkpoint-1"

    third = start_trainer()
    assert third.line() == "begin 1"
    assert [path.name for path in (volume / "checkpoints").iterdir()] == ["checkpoint-1"]


@pytest.mark.parametrize("sizes", [("10", "10"), ("10", "20")], ids=["same size", "other size"])
@pytest.mark.parametrize("exchange", ["exchange", "not"])
@pytest.mark.parametrize("note", ["note", "not"])
def test_a_process_killed_anywhere_while_it_saves_a_step_again_leaves_one_of_the_two(
    tmp_path: Path, sizes: tuple[str, str], exchange: str, note: str
) -> None:
    ended = run(str(KILLED_REPLACEMENT), str(tmp_path / "out"), *sizes, exchange, note, directory=tmp_path)
    assert ended.returncode == 0, ended.stderr
    rows = [line.split() for line in ended.stdout.splitlines()]
    contents = [content for _, content, _, _ in rows]
    assert set(contents) == {"old", "new"}
    # The new one from the moment on at which it is complete.
    assert contents == sorted(contents, reverse=True)
    names = "more,note,state" if note == "note" else "more,state"
    assert [row[2:] for row in rows] == [["True", names]] * len(rows)
    operations = [operation for operation, *_ in rows]
    # Of the note, of the record, which names the program's file later, and of each file if the folders do not change.
    renames = 5 if note == "note" else 2 if exchange == "exchange" else 4
    assert operations.count("os.rename") == renames
    assert operations.count("exchange") == (note == "not")
    assert rows[-1][0] == "none"


def test_a_second_live_process_leaves_the_firsts_unfinished_save_alone(start_trainer: Start, volume: Path) -> None:
    first = start_trainer(EVERY="1", HANG_IN_SAVE="1")
    assert first.line() == "begin 0"
    first.step()
    assert first.line() == "saving"
    second = start_trainer()
    assert second.line() == "begin 0"
    first.step()
    assert first.line() == "step 1"
    assert (volume / "checkpoints" / "checkpoint-1" / "state").read_text() == "1"


FORKING = """
import torch
import keepstep
from keepstep.agent_client import channel

# An agent that answers is not away, however slow the machine.
channel.ANNOUNCE_SECONDS = channel.Channel._call.__kwdefaults__["deadline_seconds"] = 300.0

class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return index

def loader():
    return torch.utils.data.DataLoader(
        Numbers(), batch_size=8, num_workers=2, multiprocessing_context="fork", persistent_workers=True, timeout=300
    )

if __name__ == "__main__":
    before = loader()
    early = iter(before)                       # forked before any call
    checkpointer = keepstep.Checkpointer()
    total, step = 0, 0
    for epoch in range(4):
        for batch in early if epoch == 0 else loader():      # and again after calls
            total += int(batch.sum())
            step += 1
            if checkpointer.should_save(step, every=2):
                with checkpointer.save(step) as directory:
                    torch.save({"step": step}, directory / "state.pt")
    checkpointer.finish()
    print("total", total, "steps", step)
"""


@pytest.fixture
def _no_fork_handlers_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user's shell has it: the trainer must see to it itself."""
    monkeypatch.delenv(names.ENV_GRPC_FORK_HANDLERS)


@pytest.mark.usefixtures("_no_fork_handlers_set")
def test_data_loaders_with_forked_workers_live_beside_the_calls(
    tmp_path: Path, volume: Path, agent: AgentServer
) -> None:
    script = tmp_path / "forking.py"
    script.write_text(FORKING)
    ended = run(str(script), directory=tmp_path, **{names.ENV_VOLUME: str(volume)})
    assert ended.stderr == ""
    assert (ended.returncode, ended.stdout) == (0, f"total {4 * sum(range(64))} steps 32\n")
    assert len(agent.requests("AnnounceCheckpoint")) == 16


FORK_AFTER_EVERY_CALL = """
import os, sys
from pathlib import Path
from keepstep.agent_client.channel import Channel
from keepstep.checkpoints.records import Kind
from keepstep.errors import AgentError
from keepstep.ranks.rank_store import Ranks
Channel._call.__kwdefaults__["deadline_seconds"] = 300.0
channel = Channel(Path(sys.argv[1]), Ranks())
for step in range(200):
    channel.begin_save(step=step, kind=Kind.PERIODIC, save="a")
    process_id = os.fork()
    if process_id == 0:
        try:
            channel.begin_save(step=step, kind=Kind.PERIODIC, save="a")
        except AgentError:
            # Through the interpreter's end or, as multiprocessing's children do, past it.
            sys.exit(0) if step % 2 else os._exit(0)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1]) == 0
print(len(os.listdir("/proc/self/fd")))
"""


@pytest.mark.nightly
@pytest.mark.usefixtures("_no_fork_handlers_set")
def test_a_fork_right_after_a_call_neither_hangs_nor_calls(tmp_path: Path, volume: Path, agent: AgentServer) -> None:
    socket = volume / names.STATE_DIRECTORY / names.SOCKET
    # Python 3.12 and newer warn of every fork beside threads, and gRPC keeps some.
    command = ("-W", "ignore::DeprecationWarning", "-c", FORK_AFTER_EVERY_CALL, str(socket))
    ended = run(*command, directory=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert len(agent.requests("BeginSave")) == 200
    assert int(ended.stdout) < 20


@pytest.mark.usefixtures("_no_fork_handlers_set")
def test_a_program_that_loaded_grpc_first_is_told_what_to_set(tmp_path: Path) -> None:
    told = run("-c", "import grpc, keepstep.agent_client.channel", directory=tmp_path)
    assert "GRPC_ENABLE_FORK_SUPPORT=0" in told.stderr
    told = run("-c", "import grpc, keepstep.agent_client.channel", directory=tmp_path, GRPC_ENABLE_FORK_SUPPORT="0")
    assert told.stderr == ""


LOADED = """
import sys
import keepstep
with keepstep.Checkpointer().save(1) as directory:
    (directory / "state").write_text("x")
print([name for name in ("grpc", "torch", "keepstep_agent", "aiobotocore", "google.protobuf") if name in sys.modules])
"""


def test_alone_it_loads_neither_torch_nor_grpc_nor_the_agent(tmp_path: Path) -> None:
    environment = dict.fromkeys((names.ENV_VOLUME, names.ENV_SOCKET), "")
    assert run("-c", LOADED, directory=tmp_path, **environment).stdout == "[]\n"


def test_beside_an_agent_it_loads_neither_torch_nor_the_agents_packages(
    tmp_path: Path, volume: Path, agent: AgentServer
) -> None:
    ended = run("-c", LOADED, directory=tmp_path, **{names.ENV_VOLUME: str(volume)})
    assert ended.stdout == "['grpc', 'google.protobuf']\n"


# The user's own write fails in step 2, what the client adds in step 3.
FULL = """
import keepstep
checkpointer = keepstep.Checkpointer()
with checkpointer.save(1) as directory:
    (directory / "state").write_text("1")
with checkpointer.save(2) as directory:
    (directory / "state").write_bytes(bytes(2_000_000))
blocks = checkpointer.resume().parent.parent / "blocks"
with checkpointer.save(3) as directory:
    (directory / "state").write_text("3")
    with open(blocks, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
print("training goes on")
blocks.unlink()
with checkpointer.save(4) as directory:
    (directory / "state").write_text("4")
checkpointer.finish()
print(keepstep.Checkpointer().resume().name)
"""


@pytest.mark.root
def test_a_full_volume_costs_the_checkpoint_and_not_the_training(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", 1 << 20) as volume:
        ended = run("-c", FULL, directory=tmp_path, **{names.ENV_VOLUME: str(volume)})
        assert ended.stdout.splitlines() == ["training goes on", "checkpoint-4"], ended.stderr
        assert ended.returncode == 0
        assert len(re.findall("checkpoint given up, training goes on: step=2 ", ended.stderr)) == 1
        assert not [path.name for path in (volume / "checkpoints").iterdir() if path.name.startswith(".")]


# Runs a program that waits for a line, once it has printed that it is at step 100.
HELD = """
import builtins, runpy, sys
def print_and_wait(*values, **options):
    tell(*values, **options)
    if values[0].startswith("step=100 "):
        sys.stdin.readline()
tell, builtins.print = print, print_and_wait
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.nightly
def test_the_example_stopped_and_started_again_ends_bit_identical(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "torch_loop.py")
    whole = tmp_path / "whole"
    stopped = tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    expected = run(example, directory=whole).stdout.splitlines()[-1]
    assert expected.startswith("done step=1000 weights=")

    process = subprocess.Popen(
        [sys.executable, "-c", HELD, example],
        cwd=stopped,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begin step=0\n"
    assert process.stdout.readline().startswith("step=100 ")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate("\n", timeout=HANG_SECONDS)
    assert process.returncode == names.JUST_IN_TIME_EXIT_CODE, errors

    rest = run(example, directory=stopped).stdout.splitlines()
    assert rest[0] != "begin step=0"
    assert rest[-1] == expected
