"""`make fleet` as people start it, and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from examples.fleet.stories import STORIES, End
from tests.harness.bounds import HANG_SECONDS
from tests.servers.process import wait_until

_BEGUN = "all runs have begun"
_EXIT_CODES = {End.DONE: 0, End.NOTICE: 143, End.POWER: 137, End.ERROR: 1}


@contextmanager
def _fleet(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """Run the fleet in `folder`. After a test that has failed it ends by itself, with all its processes."""
    fleet = subprocess.Popen(
        [sys.executable, "-m", "examples.fleet", "--minutes", "15"],
        env={**_environment(), "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield fleet
    finally:
        if fleet.poll() is None:
            fleet.terminate()
            fleet.communicate(timeout=HANG_SECONDS)


def _read_until(fleet: "subprocess.Popen[str]", words: str) -> str:
    assert fleet.stdout
    told = ""
    for line in fleet.stdout:
        told += line
        if words in line:
            return told
    raise AssertionError(told)


def _environment() -> dict[str, str]:
    """Return an environment in which the user's own settings would lead astray."""
    return {**os.environ, "KEEPSTEP_DESTINATION": "s3://no-such-bucket/run", "AWS_EC2_METADATA_DISABLED": "true"}


def _shown(page: str) -> set[str]:
    with urllib.request.urlopen(f"{page}api/runs", timeout=HANG_SECONDS) as answer:
        return {run["run"] for run in json.load(answer)["runs"]}


def _left_behind(folder: Path) -> list[str]:
    """Return the processes that the fleet has started and what is in its folder."""
    found = [str(path) for path in folder.iterdir()]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"TMPDIR={folder}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_fleet_shows_twelve_runs_and_ctrl_c_leaves_nothing_behind(short_directory: Path) -> None:
    with _fleet(short_directory) as fleet:
        told = _read_until(fleet, _BEGUN)
        (teams,) = short_directory.glob("keepstep-fleet-*/bucket/keepstep-fleet/teams")
        names = {story.name for story in STORIES}

        def in_the_bucket() -> set[str]:
            return {str(ledger.parent.parent.relative_to(teams)) for ledger in teams.glob("*/*/.keepstep/ledger")}

        wait_until(lambda: in_the_bucket() == names, "all runs are in the bucket", HANG_SECONDS)
        command = re.search(r"in another shell: (.*)", told)
        assert command
        report = subprocess.run(
            f"{command[1]} --json",
            shell=True,
            env=_environment(),
            stdout=subprocess.PIPE,
            check=True,
            timeout=HANG_SECONDS,
        )
        assert {run["run"] for run in json.loads(report.stdout)["runs"]} == names
        page = re.search(r"^ *(http://127\.0\.0\.1:\d+/)$", told, re.MULTILINE)
        assert page
        wait_until(lambda: _shown(page[1]) == names, "the page shows all runs")
        for end in _EXIT_CODES:
            if end not in told:
                told += _read_until(fleet, end)
        fleet.send_signal(signal.SIGINT)
        told += fleet.communicate(timeout=HANG_SECONDS)[0]
        assert fleet.returncode == 0, told
    for end, code in _EXIT_CODES.items():
        codes = re.findall(rf"{end}.*exit code (\d+)", told)
        assert codes, told
        assert set(codes) == {str(code)}, told
    # One may just have come to its own end.
    assert "ends with the fleet; exit code 143" in told, told
    assert not _left_behind(short_directory)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_fleet_that_is_terminated_as_it_begins_leaves_nothing_behind(short_directory: Path) -> None:
    with _fleet(short_directory) as fleet:
        _read_until(fleet, "runs begin")
        fleet.send_signal(signal.SIGTERM)
        told = fleet.communicate(timeout=HANG_SECONDS)[0]
        assert fleet.returncode == 128 + signal.SIGTERM, told
    assert not _left_behind(short_directory)
