"""A script on macOS and on Windows, where no agent runs: it saves and resumes locally, and is told once.

Each runs in a process that `other_system` has made to look like one there.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.lanes import nightly
from tests.servers.process import free_port

from keepstep_api import names

SYSTEMS = ("darwin", "win32")
_BEGIN = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import other_system
before = signal.getsignal(signal.SIGTERM)
other_system.become(os.environ["SYSTEM"])
"""
_END = """
assert signal.getsignal(signal.SIGTERM) == before, "SIGTERM is the program's"
assert "grpc" not in sys.modules
"""

LOOP = f"""{_BEGIN}
import keepstep
checkpointer = keepstep.Checkpointer(keep_local=2)
path = checkpointer.resume()
step = first = int((path / "state").read_text()) if path else 0
while step < first + 5 and not checkpointer.stopping:
    step += 1
    if checkpointer.should_save(step, every=2):
        with checkpointer.save(step) as directory:
            (directory / "state").write_text(str(step))
with checkpointer.save(step, kind="final") as directory:
    (directory / "state").write_text(str(step))
{_END}
checkpointer.finish()
keepstep.Checkpointer().close()
print(first, step)
"""
FRAMEWORK = f"""{_BEGIN}
from pathlib import Path
from keepstep.framework_run import FrameworkRun
from keepstep.gate import Action
from keepstep.workers import worker_processes
run = FrameworkRun.current()
run.hold_sigterm()
newest = run.newest()
step = int(newest.name.removeprefix("model-")) + 1 if newest else 1
path = run.checkpoint_directory / f"model-{{step}}"
path.mkdir()
(path / "weights").write_text("weights")
assert run.action_at(step) is Action.NOTHING
assert run.admits(step)
assert run.announce_written(path, step) is False
worker_processes.install()
{_END}
run.close()
print(newest and newest.name, path.name)
"""
TORCH_LOOP = f"""
import torch, torch.distributed.checkpoint
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(40, 4))
worker = torch.utils.data._utils.worker._worker_loop
{_BEGIN}
from keepstep.torch_loop import TorchLoop
loop = TorchLoop(model, optimizer, loader=torch.utils.data.DataLoader(data, batch_size=4))
first = loop.steps_done
for (batch,) in loop.batches(steps=first + 4):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    loop.step(every=2)
{_END}
assert torch.utils.data._utils.worker._worker_loop is worker
loop.finish()
print(first, loop.steps_done)
"""
RANKS = f"""
import torch.distributed
torch.distributed.init_process_group("gloo")
{_BEGIN}
import keepstep
checkpointer = keepstep.Checkpointer()
path = checkpointer.resume()
step = first = int((path / os.environ["RANK"]).read_text()) if path else 0
while step < first + 6:
    step += 1
    if checkpointer.should_save(step, every=3):
        with checkpointer.save(step) as directory:
            (directory / os.environ["RANK"]).write_text(str(step))
{_END}
checkpointer.finish()
torch.distributed.destroy_process_group()
print(first, step)
"""


def start(
    code: str, folder: Path, system: str, environment: Mapping[str, str] = MappingProxyType({})
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "SYSTEM": system, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """What it printed and its warnings, once it has ended."""
    output, errors = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, output + errors
    return output, errors


def is_told_once(errors: str, system: str) -> bool:
    return errors.startswith("Keepstep protects nothing on this operating system") and (
        errors.count("\n") == 1 and f"system={system} " in errors
    )


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_loop_saves_and_resumes_locally_and_is_told_once(tmp_path: Path, system: str) -> None:
    for expected in ("0 5\n", "5 10\n"):
        output, errors = said(start(LOOP, tmp_path, system))
        assert output == expected
        assert is_told_once(errors, system), errors
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        *(".keepstep", "checkpoint-10", "checkpoint-8")
    ]


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_agents_socket_is_not_called(tmp_path: Path, system: str) -> None:
    output, errors = said(start(LOOP, tmp_path, system, {names.ENV_VOLUME: str(tmp_path / "v")}))
    assert output == "0 5\n"
    assert is_told_once(errors, system), errors


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_a_framework_saved_is_recorded_and_resumed_from(tmp_path: Path, system: str) -> None:
    for expected in ("None model-1\n", "model-1 model-2\n"):
        output, errors = said(start(FRAMEWORK, tmp_path, system))
        assert output == expected
        assert is_told_once(errors, system), errors


@pytest.mark.parametrize("system", ["darwin", *nightly("win32")])
def test_a_torch_loop_saves_and_resumes_locally(tmp_path: Path, system: str) -> None:
    pytest.importorskip("torch")
    for expected in ("0 4\n", "4 8\n"):
        output, errors = said(start(TORCH_LOOP, tmp_path, system))
        assert output == expected
        assert is_told_once(errors, system), errors


@pytest.mark.parametrize("system", ["darwin", *nightly("win32")])
def test_two_ranks_save_together_and_resume_together(tmp_path: Path, system: str) -> None:
    pytest.importorskip("torch")
    for expected in ("0 6\n", "6 12\n"):
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        job["GLOO_SOCKET_IFNAME"] = "lo"
        for rank in [start(RANKS, tmp_path, system, {**job, "RANK": str(rank)}) for rank in range(2)]:
            output, errors = said(rank)
            assert output == expected
            assert is_told_once(errors, system), errors
