"""ls and verify as an operator runs them: real processes, real stores."""

from pathlib import Path

import pytest
from tests.cli.filled_destination import answer, fill
from tests.harness.warm_python import keepstep
from tests.restore.stored_checkpoints import PART_BYTES
from tests.servers.fault_proxy import FaultProxy
from tests.servers.server import Bucket

from keepstep_agent.core.settings.values import StoreSettings
from keepstep_agent.core.stored.object_layout import damage_key, marker_key


def test_ls_shows_the_newest_of_a_long_history_and_says_that_there_are_older_ones(bucket: StoreSettings) -> None:
    fill(bucket, *range(1, 23))
    shown = answer(keepstep("ls", bucket.destination, "--json"))
    assert ([row["step"] for row in shown["checkpoints"]], shown["older_exist"]) == ([*range(22, 2, -1)], True)
    assert keepstep("ls", bucket.destination).stdout.endswith(
        "older ones are not listed: raise --newest, which is 20, or add --all\n"
    )
    for arguments in (("--newest=22",), ("--all",)):
        shown = answer(keepstep("ls", bucket.destination, "--json", *arguments))
        assert (len(shown["checkpoints"]), shown["older_exist"]) == (22, False)
        assert "older" not in keepstep("ls", bucket.destination, *arguments).stdout


def test_ls_shows_the_newest_first_as_a_table_and_as_json(bucket: StoreSettings) -> None:
    fill(bucket, 100, 200)
    table = keepstep("ls", bucket.destination)
    assert (table.returncode, table.stderr) == (0, "")
    lines = table.stdout.splitlines()
    assert ["checkpoint-200" in lines[1], "checkpoint-100" in lines[2]] == [True, True]
    listed = answer(keepstep("ls", bucket.destination, "--json"))
    assert [row["step"] for row in listed["checkpoints"]] == [200, 100]
    assert listed["checkpoints"][0]["file_count"] == 4


def test_a_command_signs_for_the_region_that_the_variables_of_aws_name(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, region in (
        ("AWS_REGION", "eu-west-1"),
        ("AWS_DEFAULT_REGION", "eu-north-1"),
        ("KEEPSTEP_S3_REGION", "eu-south-1"),
    ):
        monkeypatch.setenv(variable, region)
        assert keepstep("ls", rclone_bucket.destination, "--endpoint-url", fault_proxy.endpoint_url).returncode == 0
        assert f"/{region}/s3/" in fault_proxy.log[-1].headers["authorization"]


def test_ls_of_an_empty_destination_is_no_error(bucket: StoreSettings) -> None:
    completed = keepstep("ls", bucket.destination)
    assert (completed.returncode, completed.stdout) == (0, "no committed checkpoint\n")


def test_ls_says_which_marker_is_damaged(bucket: StoreSettings) -> None:
    (info,) = fill(bucket, 100)
    path = Path(bucket.destination.removeprefix("file://")) / marker_key(info)
    path.write_bytes(b"garbage")
    completed = keepstep("ls", bucket.destination)
    assert completed.returncode == 1
    assert marker_key(info) in completed.stdout


def test_ls_says_what_a_restore_found_damaged_until_verify_finds_it_whole(bucket: StoreSettings) -> None:
    info, _ = fill(bucket, 100, 200)
    note = Path(bucket.destination.removeprefix("file://")) / damage_key(info.save)
    note.parent.mkdir(parents=True)
    note.write_text("model.pt is wrong\n")
    shown = keepstep("ls", bucket.destination)
    assert shown.returncode == 1
    assert shown.stdout.splitlines()[-1].endswith("step 100: a restore did not take it: model.pt is wrong")
    listed = keepstep("ls", bucket.destination, "--json")
    assert [row["problem"] != "" for row in answer(listed)["checkpoints"]] == [False, True]
    assert keepstep("verify", bucket.destination, "--step", 100).returncode == 0
    assert keepstep("ls", bucket.destination).returncode == 0


def test_verify_reads_every_byte_and_names_the_object_with_the_flipped_one(bucket: StoreSettings) -> None:
    fill(bucket, 100, 200, 300, flip=200)
    assert keepstep("verify", bucket.destination).returncode == 0
    damaged = keepstep("verify", bucket.destination, "--step", 200)
    assert damaged.returncode == 1
    assert "checkpoint-200/0123abcd-000200/model-0.safetensors" in damaged.stdout
    assert f"bytes {2 * PART_BYTES} to {3 * PART_BYTES}" in damaged.stdout
    everything = keepstep("verify", bucket.destination, "--all", "--json")
    assert everything.returncode == 1
    found = {row["step"]: [one["object"] for one in row["problems"]] for row in answer(everything)["checkpoints"]}
    assert found == {300: [], 200: ["checkpoint-200/0123abcd-000200/model-0.safetensors"], 100: []}


def test_verify_of_a_step_that_is_not_there_is_an_error_with_a_hint(bucket: StoreSettings) -> None:
    fill(bucket, 100)
    completed = keepstep("verify", bucket.destination, "--step", 7)
    assert completed.returncode == 1
    assert completed.stderr.splitlines() == [
        f"error: {bucket.destination} has no committed checkpoint of step 7",
        "hint: `keepstep ls` lists the checkpoints",
    ]


def test_names_of_strangers_do_not_reach_the_terminal_as_they_are(bucket: StoreSettings) -> None:
    fill(bucket, 100, 200)
    root = Path(bucket.destination.removeprefix("file://"))
    evil = "\x1b[2J\x1b]0;owned\x07\u202e[red]x"
    # As large as a marker may be, and larger; an orphan's folders; something beside the manifests.
    (root / ".keepstep" / "commits" / f"{10**12 - 1 - 300}.evil.json").write_bytes(b"x" * 9_000_000)
    (root / ".keepstep" / "commits" / f"{10**12 - 1 - 400}.{evil}.json").write_bytes(b"x")
    (root / evil / "0123abcd-000009").mkdir(parents=True)
    (root / evil / "0123abcd-000009" / evil).write_bytes(b"x")
    (root / "name" / evil).mkdir(parents=True)
    (root / "name" / evil / "x").write_bytes(b"x")
    (root / "checkpoint-200" / "0123abcd-000200" / ".keepstep" / f"manifest-{evil}.json").write_bytes(b"x")
    for arguments in (("ls",), ("verify", "--all"), ("prune", "--dry-run", "--keep-last=1"), ("prune", "--yes")):
        completed = keepstep(arguments[0], bucket.destination, *arguments[1:])
        written = completed.stdout + completed.stderr
        assert "Traceback" not in written
        assert all(character.isprintable() for character in written.replace("\n", "")), written
        assert completed.returncode == (arguments[0] != "prune"), written
    assert "step 300: " in keepstep("ls", bucket.destination).stdout


def test_verify_takes_back_a_note_of_damage_that_was_none(bucket: StoreSettings) -> None:
    (info,) = fill(bucket, 100)
    note = Path(bucket.destination.removeprefix("file://")) / ".keepstep" / "damaged" / info.save
    note.parent.mkdir()
    note.write_text("the network was bad\n")
    assert keepstep("verify", bucket.destination).returncode == 0
    assert not note.exists()
