"""`keepstep run --restore lazy`: the program starts at once, its client has the agent bring what it resumes from."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.harness.agent_process import json_lines
from tests.harness.run_process import RunProcess
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Rule
from tests.servers.server import Bucket

SAVED_BYTES = 3_000_000


def ended(run: RunProcess) -> str:
    with run:
        assert run.wait() == 0, run.output()
    return run.output()


def lines(output: str, word: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(word)]


@pytest.mark.parametrize("broken", [False, True], ids=["a good line", "a bad line"])
def test_a_program_whose_volume_is_lost_goes_on_where_it_was(
    broken: bool, tmp_path: Path, rclone_bucket: Bucket, fault_proxy: FaultProxy
) -> None:
    trainer = {"EVERY": 5, "SAVE_BYTES": SAVED_BYTES, "STEP_SECONDS": 0.0}
    settings: Any = {"endpoint_url": fault_proxy.endpoint_url}
    volume, store = tmp_path / "volume", rclone_bucket.destination
    first = RunProcess(volume, store, trainer={**trainer, "STEPS": 10}, restore="lazy", **settings)
    assert lines(ended(first), "begin") == ["begin 0"]
    shutil.rmtree(volume)
    if broken:
        fault_proxy.add(Rule(name="away", fault=Fault.STATUS, method="GET", times=3, status=503))
        fault_proxy.add(Rule(name="cut", fault=Fault.RESET_RESPONSE, target="model.bin", times=2, after_bytes=1000))
        fault_proxy.add(Rule(name="flip", fault=Fault.FLIP_RESPONSE, target="model.bin", times=1, after_bytes=1000))
    second = RunProcess(volume, store, trainer={**trainer, "STEPS": 12}, restore="lazy", **settings)
    output = ended(second)
    assert lines(output, "begin")[-1] == "begin 10"
    assert lines(output, "done")[-1] == "done 12"
    assert not broken or (fault_proxy.hits("cut") and fault_proxy.hits("flip"))
    assert not [line for line in json_lines(output) if line["event"] == "restore.nobody_asked"]


def test_a_program_that_does_not_ask_is_told_what_it_has_left_behind(tmp_path: Path) -> None:
    volume, store = tmp_path / "volume", f"file://{tmp_path}/store"
    trainer = {"EVERY": 5, "STEPS": 10, "STEP_SECONDS": 0.0}
    ended(RunProcess(volume, store, trainer=trainer))
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib\n"
        "folder = pathlib.Path(os.environ['KEEPSTEP_CHECKPOINT_DIRECTORY'])\n"
        "folder.mkdir(parents=True, exist_ok=True)\n"
        "(folder / 'state.bin').write_bytes(b'1')\n"
    )
    shutil.rmtree(volume)
    command = ("python3", str(script))
    output = ended(RunProcess(volume, store, command=command, restore="lazy"))
    (told,) = [line for line in json_lines(output) if line["event"] == "restore.nobody_asked"]
    assert told["committed_step"] == 10


def test_a_checkpoint_that_does_not_fit_the_volume_stops_the_program_and_says_so(tmp_path: Path) -> None:
    volume, store = tmp_path / "volume", f"file://{tmp_path}/store"
    trainer = {"EVERY": 5, "STEPS": 10, "STEP_SECONDS": 0.0, "SAVE_BYTES": SAVED_BYTES}
    ended(RunProcess(volume, store, trainer=trainer))
    shutil.rmtree(volume)
    with RunProcess(volume, store, trainer=trainer, restore="lazy", size_limit_bytes="1MB") as run:
        assert run.wait() == 1, run.output()
    output = run.output()
    assert "RestoreError" in output
    assert "checkpoint-10 needs" in output
    assert not lines(output.rpartition("done 10")[2], "begin")
