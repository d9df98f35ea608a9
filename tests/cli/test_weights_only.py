"""Old checkpoints lose their optimizer's files, as an operator sees it, and `keepstep download` fetches the rest."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_prune_command import content
from tests.harness.warm_python import keepstep
from tests.restore.stored_checkpoints import store_checkpoint
from tests.servers.server import Bucket

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.core.stored.object_layout import COMMITS_PREFIX

_KEEP = ("--keep-last=1", "--keep-every-steps=1", "--weights-only-after=0.001")


def _files(step: int) -> dict[str, bytes]:
    return {"model.safetensors": b"weights %d" % step, "optimizer.pt": b"o" * 2000, "config.json": b"{}"}


class _Run:
    """Three checkpoints at a real S3 server."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.settings = bucket.settings()
        asyncio.run(self._fill())

    async def _fill(self) -> None:
        async with open_store(self.settings) as store:
            for step in (1, 2, 3):
                await store_checkpoint(store, step, ranks=[_files(step)])

    async def delete(self, prefix: str) -> None:
        async with open_store(self.settings) as store:
            for key in [one.key async for one in store.list(prefix)]:
                await store.delete(key)

    def keepstep(self, command: str, *arguments: object, code: int = 0) -> str:
        """Return what the command prints: the result, or for another code the error."""
        endpoint = ("--endpoint-url", self._bucket.endpoint_url)
        completed = keepstep(command, self._bucket.destination, *arguments, *endpoint)
        assert completed.returncode == code, completed.stderr
        return completed.stderr if code else completed.stdout

    def json(self, command: str, *arguments: object) -> Any:
        return json.loads(self.keepstep(command, *arguments, "--json"))


@pytest.fixture
def run(rclone_bucket: Bucket) -> _Run:
    return _Run(rclone_bucket)


def test_prune_shows_and_then_drops_and_ls_and_verify_say_what_is_left(run: _Run) -> None:
    before = content(run.settings)
    shown = run.keepstep("prune", *_KEEP)
    rows = [line.split() for line in shown.splitlines()]
    assert [row[:6] for row in rows if "weights" in row] == [
        [f"checkpoint-{step}", f"0123abcd-00000{step}", "would", "be", "weights", "only"] for step in (2, 1)
    ]
    assert "0 saves would be deleted, 2 lose their optimizer's files, 3.9 KiB" in shown
    assert content(run.settings) == before
    dropped = run.json("prune", *_KEEP, "--yes")["weights_only"]
    assert [one["objects"] for one in dropped] == [
        [f"checkpoint-{step}/0123abcd-00000{step}/optimizer.pt"] for step in (2, 1)
    ]
    kinds = {row["step"]: (row["weights_only"], row["size_bytes"]) for row in run.json("ls")["checkpoints"]}
    assert kinds == {3: (False, 2011), 2: (True, 11), 1: (True, 11)}
    assert [line.split()[2:4] for line in run.keepstep("ls").splitlines()[2:]] == [["weights", "only"]] * 2
    for option in (("--step", 1), ("--all",)):
        assert "every byte is as it was written" in run.keepstep("verify", *option)


def test_download_fetches_one_checkpoint_and_weights_alone_only_if_asked(run: _Run, tmp_path: Path) -> None:
    run.keepstep("prune", *_KEEP, "--yes")
    out = tmp_path / "out"
    assert f"checkpoint-3 (step 3, 2.0 KiB) is in {out}/checkpoint-3" in run.keepstep("download", out)
    assert {path.name: path.read_bytes() for path in (out / "checkpoint-3").iterdir()} == _files(3)
    refused = run.keepstep("download", out, "--step", 1, code=1)
    assert "only one without its optimizer's files" in refused
    assert "add --weights-only" in refused
    fetched = run.json("download", out, "--step", 1, "--weights-only")
    assert (fetched["weights_only"], fetched["size_bytes"]) == (True, 11)
    left = {name: body for name, body in _files(1).items() if name != "optimizer.pt"}
    assert {path.name: path.read_bytes() for path in (out / "checkpoint-1").iterdir()} == left
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint-1", "checkpoint-3"]


def test_download_leaves_the_optimizer_out_and_overwrites_nothing(run: _Run, tmp_path: Path) -> None:
    run.keepstep("download", tmp_path, "--weights-only")
    assert not (tmp_path / "checkpoint-3" / "optimizer.pt").exists()
    assert "is there already" in run.keepstep("download", tmp_path, code=1)
    assert not (tmp_path / "checkpoint-3" / "optimizer.pt").exists()
    assert "no committed checkpoint of step 9" in run.keepstep("download", tmp_path, "--step", 9, code=1)
    everything = ("--optimizer-files", "*.pt,*.json,model*")
    assert "is one of --optimizer-files" in run.keepstep(
        "download", tmp_path / "other", "--weights-only", *everything, code=1
    )


def test_a_damaged_checkpoint_leaves_nothing_behind(run: _Run, tmp_path: Path) -> None:
    async def damage() -> None:
        async with open_store(run.settings) as store:
            await store.put("checkpoint-3/0123abcd-000003/model.safetensors", b"weights 4")

    asyncio.run(damage())
    assert "model.safetensors" in run.keepstep("download", tmp_path / "out", code=1)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_run_that_has_weights_alone_is_not_begun_again(run: _Run, tmp_path: Path) -> None:
    run.keepstep("prune", *_KEEP, "--yes")
    asyncio.run(run.delete(COMMITS_PREFIX))
    refused = run.keepstep("restore", "--volume", tmp_path / "volume", code=1)
    assert "no whole checkpoint any more" in refused
    assert "keepstep download --weights-only" in refused
    assert "only one without" in run.keepstep("download", tmp_path / "out", code=1)
    run.keepstep("download", tmp_path / "out", "--weights-only")
    assert (tmp_path / "out" / "checkpoint-2" / "model.safetensors").exists()
