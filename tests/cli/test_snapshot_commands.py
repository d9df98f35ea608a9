"""ls, verify and prune at a destination with snapshots: real processes, a real directory."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.catalog.stored_snapshots import output, store_snapshot
from tests.harness.warm_python import keepstep
from tests.restore.stored_checkpoints import flip_byte, store_checkpoint

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.core.model import RankManifest
from keepstep_agent.core.settings.values import StoreSettings
from keepstep_agent.core.stored.object_layout import file_key, marker_key


@pytest.fixture
def destination(tmp_path: Path) -> str:
    (tmp_path / "bucket").mkdir()
    return f"file://{tmp_path}/bucket"


def fill(destination: str, *, steps: tuple[int, ...] = ()) -> list[RankManifest]:
    """Three snapshots of one node and one of another, and announced checkpoints."""

    async def write() -> list[RankManifest]:
        async with open_store(StoreSettings(destination=destination)) as store:
            for step in steps:
                await store_checkpoint(store, step)
            found: list[RankManifest] = []
            for number in (1, 2, 3):
                base = found[-1] if found else None
                files = output(a=1, b=number)
                found.append(await store_snapshot(store, number, files, base=base, saved_at=60.0 * number))
            found.append(await store_snapshot(store, 1, output(a=1), series="node-1"))
            return found

    return asyncio.run(write())


def as_json(*arguments: str) -> Any:
    return json.loads(keepstep(*arguments, "--json").stdout)


def test_ls_lists_snapshots_below_the_checkpoints(destination: str) -> None:
    manifests = fill(destination, steps=(100, 200))
    listed = keepstep("ls", destination)
    assert (listed.returncode, listed.stderr) == (0, "")
    lines = [line.split() for line in listed.stdout.splitlines()]
    assert [line[1] for line in lines[1:3]] == ["checkpoint-200", "checkpoint-100"]
    assert [line[:2] for line in lines[3:]] == [["node-0", "snapshot"]] * 3 + [["node-1", "snapshot"]]
    assert lines[3] == ["node-0", "snapshot", "256.1", "KiB", "1970-01-01", "00:03", manifests[2].info.save]
    rows = as_json("ls", destination)
    assert [row["step"] for row in rows["checkpoints"]] == [200, 100]
    assert [(row["series"], row["number"]) for row in rows["snapshots"]] == [
        ("node-0", 3),
        ("node-0", 2),
        ("node-0", 1),
        ("node-1", 1),
    ]
    assert rows["snapshots"][0] == {
        "series": "node-0",
        "number": 3,
        "save": manifests[2].info.save,
        "file_count": 2,
        "size_bytes": manifests[2].size_bytes,
        "saved_at": 180.0,
        "problem": "",
    }


def test_ls_of_snapshots_alone_is_no_empty_list_and_names_a_damaged_marker(destination: str) -> None:
    manifests = fill(destination)
    assert "no committed checkpoint" not in keepstep("ls", destination).stdout
    key = marker_key(manifests[1].info)
    Path(destination.removeprefix("file://"), key).write_bytes(b"garbage")
    listed = keepstep("ls", destination)
    assert listed.returncode == 1
    assert f"snapshot 2 of node-0: {key}" in listed.stdout


def test_verify_takes_the_newest_of_each_node_and_all_if_asked(destination: str) -> None:
    manifests = fill(destination, steps=(100, 200))
    said = keepstep("verify", destination).stdout.splitlines()
    assert [line.split(" (")[0] for line in said] == [
        "step 200",
        "snapshot node-0 1970-01-01 00:03",
        "snapshot node-1 1970-01-01 00:16",
    ]
    assert all(line.endswith(": every byte is as it was written") for line in said)

    async def damage() -> None:
        async with open_store(StoreSettings(destination=destination)) as store:
            await flip_byte(store, file_key(manifests[0].info, "out/a.pt"), 7)

    asyncio.run(damage())
    # The object of the first one is a part of all three.
    assert keepstep("verify", destination).returncode == 1
    rows = as_json("verify", destination, "--all")
    assert [(row["step"], row["problems"]) for row in rows["checkpoints"]] == [(200, []), (100, [])]
    found = {(row["series"], row["number"]): [one["object"] for one in row["problems"]] for row in rows["snapshots"]}
    key = file_key(manifests[0].info, "out/a.pt")
    assert found == {("node-0", 3): [key], ("node-0", 2): [key], ("node-0", 1): [key], ("node-1", 1): []}


def test_verify_of_a_step_means_an_announced_checkpoint(destination: str) -> None:
    fill(destination)
    assert keepstep("verify", destination).returncode == 0
    completed = keepstep("verify", destination, "--step", 1)
    assert (completed.returncode, "no committed checkpoint of step 1" in completed.stderr) == (1, True)


def test_prune_says_what_others_share_and_what_it_frees(destination: str) -> None:
    manifests = fill(destination)
    report = as_json("prune", destination, "--keep-last", "1", "--yes")
    assert [(one["save"], one["committed"]) for one in report["deleted"]] == [
        (manifests[0].info.save, True),
        (manifests[1].info.save, True),
    ]
    assert report["deleted"][0]["reason"] == "1 newer is valid; others share some of its objects"
    assert file_key(manifests[0].info, "out/a.pt") not in report["deleted"][0]["objects"]
    assert keepstep("verify", destination, "--all").returncode == 0
    assert [row["number"] for row in as_json("ls", destination)["snapshots"]] == [3, 1]
    assert not Path(destination.removeprefix("file://"), ".keepstep", "pruned").exists()
