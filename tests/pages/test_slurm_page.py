"""The scripts on the page about Slurm are those of examples/slurm, and the tests run each of them."""

import re
import subprocess
from pathlib import Path

from tests.harness.bounds import HANG_SECONDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "slurm.md").read_text()
SCRIPTS = sorted((ROOT / "examples" / "slurm").glob("*.sh"))


def test_the_page_shows_every_script_as_it_is() -> None:
    shown = re.findall(r"```sh\n(#!/bin/bash\n.*?)```", PAGE, re.DOTALL)
    assert sorted(shown) == sorted(script.read_text() for script in SCRIPTS)


def test_every_script_is_run_by_a_test_on_real_slurm() -> None:
    tests = (ROOT / "tests" / "slurm" / "test_slurm.py").read_text()
    assert [script.name for script in SCRIPTS if f'"{script.name}"' not in tests] == []


def test_every_script_can_be_parsed_by_bash() -> None:
    for script in SCRIPTS:
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=HANG_SECONDS)


def test_the_page_names_log_lines_and_messages_that_exist() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "agent").rglob("*.py"))
    events = set(re.findall(r"`((?:run|commit)\.[a-z_]+)`", PAGE))
    assert events
    assert [event for event in events if f'"{event}"' not in sources] == []
    assert "another `keepstep run` uses the volume" in sources
