"""`keepstep run --autoload` says where autoload is not active in a process that has imported torch, and what hid it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.client.autoload.fake_torch import write_program, write_torch
from tests.client.autoload.stage import Stage, run, write
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.run_process import RunProcess


def warnings_of(tmp_path: Path, *command: str) -> list[dict[str, Any]]:
    """Run the command until the runner has warned, let it end, and return all warnings that autoload is not active."""
    (tmp_path / "bucket").mkdir()
    with RunProcess(
        tmp_path / "volume", f"file://{tmp_path}/bucket", command=command, autoload=True, watch="off"
    ) as running:
        wait_until(lambda: bool(running.log("run.autoload_not_active")), HANG_SECONDS, "the runner has warned")
        (tmp_path / "end").touch()
        assert running.wait() == 0, running.output()
        return running.log("run.autoload_not_active")


@pytest.mark.parametrize(("switch", "ignored"), [("-S", "sitecustomize"), ("-I", "PYTHONPATH")])
def test_a_switch_of_python_that_hides_autoload_is_named(tmp_path: Path, switch: str, ignored: str) -> None:
    program = write_program(tmp_path / "program.py", "import torch\nwait_for('end')\n")
    (warning,) = warnings_of(tmp_path, sys.executable, switch, str(program))
    assert warning["level"] == "warning"
    assert warning["command"] == f"{sys.executable} {switch} {program}"
    assert warning["problem"] == f"python {switch} ignores {ignored}"
    assert warning["hint"].startswith(f"start Python without {switch}; or call keepstep.protect")


def write_tool(tmp_path: Path, text: str = "") -> Path:
    """Write a tool that puts its sitecustomize first and starts a program, as opentelemetry-instrument does."""
    theirs = write(tmp_path / "theirs" / "sitecustomize.py", text).parent
    tool = write(tmp_path / "tool", f'#!/bin/sh\nPYTHONPATH={theirs}:$PYTHONPATH exec "$@"\n')
    tool.chmod(0o755)
    return tool


def test_a_sitecustomize_that_hides_autoload_from_the_real_torch_is_named(tmp_path: Path) -> None:
    tool = write_tool(tmp_path)
    program = write(
        tmp_path / "program.py",
        f"import os, time, torch\nwhile not os.path.exists({str(tmp_path / 'end')!r}):\n    time.sleep(0.1)\n",
    )
    (warning,) = warnings_of(tmp_path, str(tool), sys.executable, str(program))
    assert warning["problem"] == f"the sitecustomize of {tmp_path / 'theirs'} comes first on its PYTHONPATH"
    assert warning["hint"].startswith("write tool before keepstep, as in: tool keepstep run --autoload --to DEST")


THEIRS_STAYS_FIRST = """
import os
here = os.path.dirname(os.path.abspath(__file__))
entries = [entry for entry in os.environ["PYTHONPATH"].split(os.pathsep) if entry != here]
os.environ["PYTHONPATH"] = os.pathsep.join([here, *entries])
"""
"""As OpenTelemetry's does it when it has begun."""


def test_behind_the_tool_keepstep_is_active_in_the_program_and_its_children(tmp_path: Path) -> None:
    tool = write_tool(tmp_path, THEIRS_STAYS_FIRST)
    body = """if True:
        import subprocess
        import torch
        print("active", "_keepstep_autoload.zero_code" in sys.modules, "sitecustomize" in sys.modules, flush=True)
        if len(sys.argv) == 1:
            subprocess.run([sys.executable, __file__, "child"], check=True)
    """
    program = write_program(tmp_path / "program.py", body)
    command = [str(tool), sys.executable, "-m", "keepstep_agent", "run", "--autoload", "--watch=off"]
    command += ["--to", f"file://{tmp_path}/bucket", "--volume", str(tmp_path / "volume")]
    (tmp_path / "bucket").mkdir()
    got = subprocess.run(
        [*command, "--", sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert got.stdout == "active True True\n" * 2, got.stderr


@pytest.mark.parametrize("switch", ["", "0"])
def test_a_program_with_autoload_or_with_none_on_purpose_is_not_warned_of(tmp_path: Path, switch: str) -> None:
    """It starts a second process later, which is: had there been anything to say of the first, that had come before."""
    body = """if True:
        import subprocess
        import torch
        if sys.flags.no_site:
            wait_for("end")
        else:
            os.environ.pop("KEEPSTEP_AUTOLOAD", None)
            subprocess.run([sys.executable, "-S", __file__], check=True)
    """
    program = write_program(tmp_path / "program.py", body)
    command = ["env", f"KEEPSTEP_AUTOLOAD={switch}", sys.executable, str(program)]
    (warning,) = warnings_of(tmp_path, *command)
    assert warning["command"] == f"{sys.executable} -S {program}"


def noted(stage: Stage, tmp_path: Path, code: str, *path: Path, python: str = "") -> list[str]:
    """Return the names of the processes that have noted themselves."""
    processes = write(tmp_path / "processes", "")
    folders = (*path, stage.injected, write_torch(tmp_path / "packages"))
    got = run("-c", code, path=folders, environment={"KEEPSTEP_AUTOLOAD_PROCESSES": str(processes)}, python=python)
    assert (got.stderr, got.returncode) == ("", 0)
    return [line.split()[1] for line in processes.read_text().splitlines()]


def test_a_process_notes_itself_once_before_torch_is_loaded(stage: Stage, tmp_path: Path) -> None:
    checks = f"assert open({str(tmp_path / 'processes')!r}).read(), 'torch is loaded before'\n"
    library = write_torch(tmp_path / "packages") / "torch" / "early.py"
    write(library, checks)
    code = "import torch.early, torch, sys; assert not any('BeforeTorch' in repr(one) for one in sys.meta_path)"
    assert len(noted(stage, tmp_path, code)) == 1


def test_a_process_without_torch_notes_nothing(stage: Stage, tmp_path: Path) -> None:
    assert noted(stage, tmp_path, "import json") == []


def test_a_process_whose_torch_another_tool_has_imported_notes_itself_too(
    stage: Stage, tmp_path: Path, with_user_packages: str
) -> None:
    theirs = write(tmp_path / "theirs" / "sitecustomize.py", "import torch\n").parent
    assert len(noted(stage, tmp_path, "", theirs, python=with_user_packages)) == 1


def test_where_there_is_no_list_a_process_makes_none(stage: Stage, tmp_path: Path) -> None:
    path = (stage.injected, write_torch(tmp_path / "packages"))
    for file in (tmp_path / "none", tmp_path / "no" / "folder"):
        got = run("-c", "import torch", path=path, environment={"KEEPSTEP_AUTOLOAD_PROCESSES": str(file)})
        assert (got.stderr, got.returncode, file.exists()) == ("", 0, False)
