"""du as an operator runs it, on real stores: what it counts is what the store holds."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.catalog.stored_snapshots import output, store_snapshot
from tests.harness.warm_python import keepstep
from tests.lanes import nightly
from tests.restore.stored_checkpoints import store_checkpoint
from tests.servers.server import Bucket

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.core.model import Kind
from keepstep_agent.core.settings.values import MIB, StoreSettings

GIB = 1024 * MIB


def fill(settings: StoreSettings, run: str, *kinds: Kind, snapshots: bool = False) -> None:
    """Checkpoints of a run below the destination: steps 1, 2, … of these kinds, and one that never committed."""

    async def write() -> None:
        below = StoreSettings(destination=f"{settings.destination}/{run}", endpoint_url=settings.endpoint_url)
        async with open_store(below) as store:
            for step, kind in enumerate(kinds, start=1):
                await store_checkpoint(store, step, kind=kind)
            await store_checkpoint(store, 90, committed=False)
            if snapshots:
                await store_snapshot(store, 1, output(a=1))

    asyncio.run(write())


def du(settings: StoreSettings, *options: object) -> Any:
    endpoint = ("--endpoint-url", settings.endpoint_url) if settings.endpoint_url else ()
    completed = keepstep("du", settings.destination, *endpoint, "--json", *options)
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)


def listed_bytes(bucket: Bucket, prefix: str) -> int:
    """As boto3 sees it."""
    pages = bucket.client().get_paginator("list_objects_v2").paginate(Bucket=bucket.name, Prefix=prefix)
    return sum(one["Size"] for page in pages for one in page.get("Contents", []))


def kinds_of(usage: Any, field: str = "count") -> dict[str, int]:
    return {kind: amount[field] for kind, amount in usage["kinds"].items()}


@pytest.mark.parametrize("server", ["rclone", *nightly("seaweed")])
def test_what_du_counts_is_what_the_bucket_holds(server: str, request: pytest.FixtureRequest) -> None:
    bucket: Bucket = request.getfixturevalue(f"{server}_bucket")
    settings = bucket.settings()
    fill(settings, "done", Kind.PERIODIC, Kind.JUST_IN_TIME, Kind.FINAL)
    fill(settings, "team/goes-on", Kind.PERIODIC, snapshots=True)
    client = bucket.client()
    client.put_object(Bucket=bucket.name, Key=f"{bucket.prefix}/notes/of/somebody.txt", Body=b"x" * 321)
    client.put_object(Bucket=bucket.name, Key=f"{bucket.prefix}-beside/x", Body=b"not below the prefix")
    key = f"{bucket.prefix}/done/checkpoint-91/0123abcd-000091/model.pt"
    upload = client.create_multipart_upload(Bucket=bucket.name, Key=key)["UploadId"]
    for number, size_bytes in ((1, 5 * MIB), (2, 1000)):
        client.upload_part(Bucket=bucket.name, Key=key, UploadId=upload, PartNumber=number, Body=b"x" * size_bytes)

    found = du(settings)

    assert [(run["run"], run["state"], run["step"]) for run in found["runs"]] == [
        ("done", "complete", 3),
        ("team/goes-on", "active", 1),
    ]
    uploads = kinds_of(found["total"], "size_bytes")["upload-in-progress"]
    assert uploads == 5 * MIB + 1000
    assert found["total"]["size_bytes"] - uploads == listed_bytes(bucket, f"{bucket.prefix}/")
    assert found["runs"][1]["size_bytes"] == listed_bytes(bucket, f"{bucket.prefix}/team/goes-on/")
    assert kinds_of(found["outside_of_runs"], "size_bytes") == {"foreign": 321}
    assert kinds_of(found["runs"][0]) == {
        "checkpoint": 3,
        "in-progress": 1,
        "record": 3,
        "upload-in-progress": 1,
    }
    assert kinds_of(found["runs"][1])["snapshot"] == 1
    assert sum(found["total"]["ages"].values()) == found["total"]["size_bytes"]

    every = du(settings, "--kinds", "--orphaned-after", "0s", "--abandoned-after", "0s")

    assert [run["state"] for run in every["runs"]] == ["complete", "abandoned"]
    assert kinds_of(every["runs"][0]) == {
        "periodic": 1,
        "just-in-time": 1,
        "final": 1,
        "leftover": 1,
        "record": 3,
        "orphaned-upload": 1,
    }


@pytest.fixture
def directory(tmp_path: Path) -> StoreSettings:
    (tmp_path / "runs").mkdir()
    return StoreSettings(destination=f"file://{tmp_path}/runs")


def test_du_of_a_directory_counts_the_uploads_that_lie_in_its_runs(directory: StoreSettings) -> None:
    fill(directory, "one", Kind.PERIODIC)
    root = Path(directory.destination.removeprefix("file://"))
    left = root / "one" / ".keepstep" / "uploads" / "put-0123"
    left.write_bytes(b"x" * 77)

    for settings, name in ((directory, "one"), (StoreSettings(destination=f"{directory.destination}/one"), ".")):
        (run,) = du(settings)["runs"]
        assert run["run"] == name
        assert run["kinds"]["upload-in-progress"] == {"count": 1, "size_bytes": 77}
        files = [path.stat().st_size for path in (root / "one").rglob("*") if path.is_file()]
        assert run["size_bytes"] == sum(files)


def test_a_table_shows_runs_kinds_ages_and_what_they_cost(directory: StoreSettings) -> None:
    fill(directory, "small", Kind.FINAL)
    fill(directory, "large", Kind.PERIODIC, Kind.PERIODIC, Kind.PERIODIC)
    price = 1000.0

    completed = keepstep("du", directory.destination, "--price-per-gib-month", price)

    assert (completed.returncode, completed.stderr) == (0, "")
    lines = completed.stdout.splitlines()
    assert lines[0].split()[-2:] == ["A", "MONTH"]
    assert [line.split()[:3] for line in lines[1:3]] == [["large", "active", "3"], ["small", "complete", "1"]]
    whole = du(directory, "--price-per-gib-month", price)["total"]
    assert whole["cost_per_month"] == pytest.approx(whole["size_bytes"] / GIB * price, abs=1e-5)
    (all_kinds,) = [line for line in lines if line.startswith("all ")]
    assert all_kinds.split()[-1] == f"{whole['cost_per_month']:.2f}"
    assert any(line.startswith("less than a day") for line in lines)
    assert "A MONTH" not in keepstep("du", directory.destination).stdout
    assert "cost_per_month" not in du(directory)["total"]


def test_du_of_a_prefix_without_runs_says_so_and_is_no_failure(directory: StoreSettings) -> None:
    completed = keepstep("du", directory.destination)
    assert (completed.returncode, completed.stdout.splitlines()[0]) == (0, "no run")
    missing = keepstep("du", f"{directory.destination}/away")
    assert missing.returncode == 1
    assert "hint: " in missing.stderr


def test_du_leaves_no_trace(directory: StoreSettings) -> None:
    fill(directory, "one", Kind.PERIODIC)
    root = Path(directory.destination.removeprefix("file://"))
    before = sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*"))
    du(directory, "--kinds")
    assert sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*")) == before


def test_names_of_strangers_do_not_reach_the_terminal_as_they_are(directory: StoreSettings) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07\u202e[red]x"
    fill(directory, f"runs {evil}", Kind.PERIODIC)
    marker = next(Path(directory.destination.removeprefix("file://")).rglob("commits/*.json"))
    marker.write_bytes(b"garbage")

    completed = keepstep("du", directory.destination)

    written = completed.stdout + completed.stderr
    assert completed.returncode == 0
    assert "\\x1b[2J" in written
    assert "1 commit markers cannot be read" in written
    assert all(character.isprintable() or character == "\n" for character in written)
    assert du(directory)["runs"][0]["run"] == f"runs {evil}"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--abandoned-after", "soon"), "'soon' is not a duration; write seconds, or a number with s, m, h or d"),
        (("--price-per-gib-month", "nan"), "'nan' is not a price: write a number such as 0.023"),
        (("--price-per-gib-month", "-1"), "'-1' is not a price"),
        (("--orphaned-after", "1 week"), "'1 week' is not a duration"),
    ],
)
def test_a_wrong_quantity_is_refused_with_what_to_write(
    directory: StoreSettings, options: tuple[str, ...], problem: str
) -> None:
    refused = keepstep("du", directory.destination, *options)
    assert refused.returncode == 2
    assert problem in " ".join(refused.stderr.split())
