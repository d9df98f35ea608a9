"""SIGTERM to a command at any time: as an ordinary process, and as process 1 of a container, which no signal kills."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.podsim.namespaces import missing_namespaces
from tests.podsim.process import only_child
from tests.restore.stored_checkpoints import all_files, store_checkpoint
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Rule
from tests.servers.server import Bucket

from keepstep_agent.adapters.open_store import open_store

_TERMINATED = 128 + signal.SIGTERM


@contextmanager
def running(*arguments: object, as_process_1: bool) -> Iterator["subprocess.Popen[str]"]:
    """`keepstep` with these arguments. As process 1 it is the only child of what is yielded, and ends with its code."""
    if as_process_1 and missing_namespaces():
        pytest.skip(missing_namespaces())
    own_processes = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"] if as_process_1 else []
    command = [*own_processes, sys.executable, "-m", "keepstep_agent", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def terminate(process: "subprocess.Popen[str]", *, as_process_1: bool) -> tuple[int, str]:
    """Its exit code and what it said."""
    pid = only_child(process.pid) if as_process_1 else process.pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=HANG_SECONDS)
    return process.returncode, output


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "as_process_1", [False, pytest.param(True, marks=pytest.mark.root)], ids=["ordinary", "process 1"]
)
def test_a_restore_that_downloads_leaves_at_once_with_143_and_nothing_half_made(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path, as_process_1: bool
) -> None:
    async def fill() -> None:
        async with open_store(rclone_bucket.settings()) as store:
            await store_checkpoint(store, 100)

    asyncio.run(fill())
    fault_proxy.add(Rule(name="hang", fault=Fault.BLACKHOLE, method="GET", target="model-0", times=-1))
    volume = tmp_path / "volume"
    arguments = ("restore", rclone_bucket.destination, "--endpoint-url", fault_proxy.endpoint_url, "--volume", volume)
    with running(*arguments, as_process_1=as_process_1) as process:
        wait_until(lambda: fault_proxy.hits("hang") > 0, HANG_SECONDS, "it downloads")
        code, output = terminate(process, as_process_1=as_process_1)
    assert code == _TERMINATED, output
    assert list((volume / "checkpoints").iterdir()) == []

    fault_proxy.clear()
    with running(*arguments, as_process_1=as_process_1) as process:
        output, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, output
    assert content(volume / "checkpoints" / "checkpoint-100") == all_files(100)
    assert list((volume / ".keepstep" / "incoming").iterdir()) == []


@pytest.mark.root
def test_an_operators_command_that_is_process_1_hears_sigterm_too(
    rclone_bucket: Bucket, fault_proxy: FaultProxy
) -> None:
    """`keepstep prune` in a CronJob, say."""
    fault_proxy.add(Rule(name="hang", fault=Fault.BLACKHOLE, times=-1))
    arguments = (
        "prune",
        rclone_bucket.destination,
        "--endpoint-url",
        fault_proxy.endpoint_url,
        "--keep-last=1",
        "--yes",
    )
    with running(*arguments, as_process_1=True) as process:
        wait_until(lambda: fault_proxy.hits("hang") > 0, HANG_SECONDS, "it asks the store")
        code, output = terminate(process, as_process_1=True)
    assert code == _TERMINATED, output


_TOLD_TO_END_AT_ITS_START = """
import os, signal
from keepstep_agent.__main__ import main
from keepstep_agent.adapters import priority
def told(**_):
    os.kill(os.getpid(), signal.SIGTERM)
priority.set_priority = told
main()
"""


def test_an_agent_that_is_told_to_end_while_it_starts_still_drains(tmp_path: Path) -> None:
    arguments = ["agent", "--volume", str(tmp_path / "volume"), "--destination", f"file://{tmp_path}/bucket"]
    (tmp_path / "bucket").mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", _TOLD_TO_END_AT_ITS_START, *arguments, "--log-format", "json"],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert '"agent.exiting"' in ended.stderr
