"""`keepstep report` as an operator runs it: on one run, on all runs below a prefix, and where there is no ledger."""

import asyncio
import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.core.noted_lives import NotedLife, killed_and_resumed
from tests.harness.warm_python import keepstep
from tests.restore.stored_checkpoints import all_files, store_checkpoint
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Rule
from tests.servers.server import Bucket

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.core.settings.values import StoreSettings
from keepstep_agent.core.stored.ledger import encode_life
from keepstep_agent.core.stored.object_layout import ledger_key

LOST = {"restore": 35.0, "start": 35.0, "stall": 14.0, "redone": 60.0, "drain": 90.0, "waiting": 40.0}


def note(
    settings: StoreSettings,
    *,
    run: str = "",
    steps: tuple[int, ...] = (),
    lives: Sequence[NotedLife] | None = None,
) -> None:
    """A run with known losses, below a destination; and checkpoints in it."""
    noted = killed_and_resumed() if lives is None else lives

    async def write() -> None:
        async with open_store(settings) as store:
            for life in (one.life for one in noted):
                for entry in life.entries:
                    key = run + ledger_key(life.attempt, entry.at, f"{life.agent}.{entry.number}")
                    await store.put(key, encode_life(replace(life, entries=(entry,))))
            for step in steps:
                await store_checkpoint(store, step)

    asyncio.run(write())


def answer(completed: subprocess.CompletedProcess[str]) -> Any:
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)


def test_a_runs_report_says_what_was_lost_and_why(bucket: StoreSettings) -> None:
    note(bucket)
    completed = keepstep("report", bucket.destination)
    assert (completed.returncode, completed.stderr) == (0, "")
    lines = completed.stdout.splitlines()
    assert lines[0] == "goodput 72.6%: 12 min of 17 min were work that lasts"
    assert [" ".join(line.split()[:4]) for line in lines[2:8]] == [
        "restore 35.0 s 3.5%",
        "start 35.0 s 3.5%",
        "stall 14.0 s 1.4%",
        "redone 1 min 6.0%",
        "drain 2 min 9.0%",
        "waiting 40.0 s 4.0%",
    ]
    assert lines[8:] == [
        "2 starts, 3 committed checkpoints, 60 steps redone, 1 s each",
        "just-in-time saves kept 520 steps, 9 min of work",
    ]


def test_a_report_as_json_has_the_figures_and_their_metrics(bucket: StoreSettings) -> None:
    note(bucket)
    (run,) = answer(keepstep("report", bucket.destination, "--json"))["runs"]
    assert (run["run"], run["wall_seconds"], run["lost_seconds"]) == (".", 1000.0, LOST)
    assert run["goodput"] == pytest.approx(0.726)
    assert [start["resumed_step"] for start in run["starts"]] == [0, 200]
    assert run["metrics"]['keepstep_lost_seconds{run=".",cause="stall"}'] == 14.0
    assert run["metrics"]['keepstep_goodput_ratio{run="."}'] == run["goodput"]


def test_a_prefix_reports_every_run_below_it(rclone_bucket: Bucket) -> None:
    settings = StoreSettings(destination=f"{rclone_bucket.destination}/runs", endpoint_url=rclone_bucket.endpoint_url)
    for run in ("one/", "team/two/"):
        note(settings, run=run)
    command = ("report", settings.destination, "--endpoint-url", rclone_bucket.endpoint_url)
    found = answer(keepstep(*command, "--json"))
    assert [run["run"] for run in found["runs"]] == ["one", "team/two"]
    assert (found["together"]["wall_seconds"], found["together"]["goodput"]) == (2000.0, pytest.approx(0.726))
    assert "keepstep_goodput_ratio" in found["together"]["metrics"]
    lines = keepstep(*command).stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["one", "72.6%"], ["team/two", "72.6%"]]
    alone = answer(keepstep("report", f"{settings.destination}/one", *command[2:], "--json"))
    assert [run["run"] for run in alone["runs"]] == ["."]


def test_damaged_objects_are_counted_and_the_rest_is_reported(bucket: StoreSettings) -> None:
    note(bucket)
    folder = Path(bucket.destination.removeprefix("file://")) / ".keepstep" / "ledger" / "job"
    (folder / "1700000000000-damaged.json").write_bytes(b"\x00" * 100)
    completed = keepstep("report", bucket.destination)
    assert completed.stdout.splitlines()[0].startswith("goodput 72.6%")
    assert completed.stdout.endswith("1 objects of the ledger cannot be read or are too many, and were left out\n")


def test_objects_that_the_store_refuses_are_counted_unless_it_refuses_all(
    rclone_bucket: Bucket, fault_proxy: FaultProxy
) -> None:
    settings = replace(rclone_bucket.settings(), endpoint_url=fault_proxy.endpoint_url)
    note(settings)
    archived = b"<Error><Code>InvalidObjectState</Code></Error>"

    def report(*, refused: str) -> subprocess.CompletedProcess[str]:
        rule = Rule(name="archived", fault=Fault.STATUS, method="GET", status=403, body=archived, times=-1)
        fault_proxy.add(replace(rule, target=refused))
        return keepstep("report", settings.destination, "--endpoint-url", fault_proxy.endpoint_url)

    # The second entry of the first agent: its ranks came.
    one = report(refused="-first.2.json")
    assert one.returncode == 0, one.stderr
    assert one.stdout.endswith("1 objects of the ledger cannot be read or are too many, and were left out\n")
    everything = report(refused="/ledger/job/")
    assert (everything.returncode, everything.stdout) == (1, "")
    assert "restore it to a readable class first" in everything.stderr


def test_a_destination_without_a_ledger_is_an_error_with_a_hint(bucket: StoreSettings) -> None:
    completed = keepstep("report", bucket.destination)
    assert (completed.returncode, completed.stdout) == (1, "")
    assert completed.stderr.splitlines() == [
        f"error: {bucket.destination} has no ledger",
        "hint: give the destination of a run, or a prefix of several; agents keep a ledger from 0.1.0 on",
    ]


def test_other_commands_do_not_see_the_ledger(bucket: StoreSettings, tmp_path: Path) -> None:
    note(bucket, steps=(100, 200))
    listed = answer(keepstep("ls", bucket.destination, "--json"))
    assert [row["step"] for row in listed["checkpoints"]] == [200, 100]
    assert keepstep("verify", bucket.destination, "--all").returncode == 0
    pruned = answer(keepstep("prune", bucket.destination, "--keep-last", 1, "--yes", "--json"))
    assert [one["save"] for one in pruned["deleted"]] == ["0123abcd-000100"]
    assert pruned["litter"] == []
    restored = keepstep("restore", bucket.destination, "--volume", tmp_path / "volume")
    assert restored.returncode == 0, restored.stderr
    place = tmp_path / "volume" / "checkpoints" / "checkpoint-200"
    files = {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert files == all_files(200)
    (run,) = answer(keepstep("report", bucket.destination, "--json"))["runs"]
    assert run["lost_seconds"] == LOST
