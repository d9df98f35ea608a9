"""What never succeeds: a store that refuses everything or one key, a file that cannot be read, a folder without an end.

Each is named, and costs no other checkpoint.
"""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from tests.harness.agent_process import AgentProcess, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.harness.endless_folder import endless_folder
from tests.harness.run_process import NOT_DURABLE, RunProcess
from tests.harness.warm_python import keepstep
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Rule
from tests.servers.server import Bucket

MIB: Final = 1024 * 1024
REFUSALS: Final = {
    "InvalidStorageClass": (400, "storage class"),
    "XMinioAdminBucketQuotaExceeded": (400, "quota"),
    "QuotaExceeded": (403, "quota"),
    "KMS.DisabledException": (400, "KMS key"),
    "NoSuchBucket": (404, "create the bucket"),
    "EntityTooLarge": (400, "size"),
    "InvalidArgument": (400, "InvalidArgument"),
}


def refusal(name: str, target: str) -> Rule:
    status, _ = REFUSALS[name]
    body = f"<Error><Code>{name}</Code><Message>no</Message></Error>".encode()
    return Rule(name=name, fault=Fault.STATUS, method="PUT", target=target, times=-1, status=status, body=body)


@pytest.mark.parametrize("code", REFUSALS)
def test_a_run_whose_store_refuses_every_upload_ends_and_says_why(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path, code: str
) -> None:
    fault_proxy.add(refusal(code, "/checkpoint-"))
    options: dict[str, Any] = {"endpoint_url": fault_proxy.endpoint_url, "drain_timeout_seconds": 600}
    with RunProcess(tmp_path / "volume", rclone_bucket.destination, trainer={"STEPS": 4, "EVERY": 2}, **options) as run:
        assert run.wait() == NOT_DURABLE, run.output()
    output = run.output()
    lost = [line for line in output.splitlines() if line.startswith("keepstep: not durable: ")]
    assert [line.split()[3] for line in lost] == ["checkpoint-4", "checkpoint-2"], output
    assert all(code in line and REFUSALS[code][1] in line for line in lost), lost
    (waiting,) = [line for line in output.splitlines() if line.startswith("keepstep: not stored yet: ")]
    assert REFUSALS[code][1] in waiting


def test_a_run_waits_for_a_store_that_fails_as_long_as_the_setting_says(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    fault_proxy.add(Rule(name="busy", fault=Fault.STATUS, method="PUT", target="/checkpoint-", times=-1, status=503))
    options: dict[str, Any] = {"endpoint_url": fault_proxy.endpoint_url, "drain_timeout_seconds": 3}
    with RunProcess(tmp_path / "volume", rclone_bucket.destination, trainer={"STEPS": 2}, **options) as run:
        assert run.wait() == NOT_DURABLE, run.output()
    assert "checkpoint-2 (step 2, final) is " in run.output()


def test_what_a_repaired_store_takes_in_the_next_run_is_what_the_last_one_kept(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    fault_proxy.add(refusal("QuotaExceeded", "/checkpoint-"))
    options: dict[str, Any] = {"endpoint_url": fault_proxy.endpoint_url}
    with RunProcess(tmp_path / "volume", rclone_bucket.destination, trainer={"STEPS": 2}, **options) as run:
        assert run.wait() == NOT_DURABLE, run.output()
    fault_proxy.clear()
    with RunProcess(tmp_path / "volume", rclone_bucket.destination, trainer={"STEPS": 2}, **options) as run:
        assert run.wait() == 0, run.output()
    assert BucketView(rclone_bucket).steps() == [2]


def commit_beside(agent: AgentProcess, *steps: int) -> None:
    """Announce other checkpoints, and wait for them."""
    paths = {step: agent.checkpoints / f"checkpoint-{step}" for step in steps}
    saves = [
        agent.announce(write_checkpoint(path, {"a.bin": 2 * MIB}, seed=step), step).save for step, path in paths.items()
    ]
    for save in saves:
        agent.wait_committed(save)


def named(agent: AgentProcess, step: int) -> str:
    """What `status` says of a checkpoint that is set aside."""
    rows = [row for row in agent.status().checkpoints if row.step == step]
    return rows[0].reason


@pytest.mark.parametrize("code", ["InvalidArgument", "QuotaExceeded"])
def test_a_key_that_the_store_refuses_costs_its_checkpoint_and_no_other(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path, code: str
) -> None:
    fault_proxy.add(refusal(code, "refused.bin"))
    with AgentProcess(
        tmp_path / "volume", rclone_bucket.destination, endpoint_url=fault_proxy.endpoint_url, grace_seconds=3
    ) as agent:
        commit_beside(agent, 1)
        sizes = {"refused.bin": 2 * MIB, "other.bin": 2 * MIB}
        agent.announce(write_checkpoint(agent.checkpoints / "checkpoint-2", sizes, seed=2), 2)
        wait_until(lambda: code in named(agent, 2), HANG_SECONDS, "status names it")
        commit_beside(agent, 3, 4)
        agent.terminate()
        assert agent.wait(HANG_SECONDS) == 0, agent.log_text()
        (line,) = agent.log("checkpoint.set_aside")
        assert line["path"] == "refused.bin"
        assert "not durable: checkpoint-2 " in agent.log_text()
    assert BucketView(rclone_bucket).steps() == [1, 3, 4]


@contextmanager
def watched_run(bucket: Bucket, proxy: FaultProxy, directory: Path, **settings: Any) -> Iterator[RunProcess]:
    """A program that leaves refused.bin and good.bin in `out`, and last.bin once the file `stop` is there.

    Yielded once a snapshot is committed; `stop` comes after that.
    """
    out, stop = directory / "out", directory / "stop"
    program = (
        "import pathlib, time\n"
        f"out, stop = pathlib.Path({str(out)!r}), pathlib.Path({str(stop)!r}); out.mkdir()\n"
        "for name in ('refused', 'good'): (out / f'{name}.bin').write_bytes(bytes(2**21))\n"
        "until = time.monotonic() + 900\n"
        "while not stop.exists() and time.monotonic() < until: time.sleep(0.05)\n"
        "(out / 'last.bin').write_bytes(bytes(2**21))\n"
    )
    with RunProcess(
        directory / "volume",
        bucket.destination,
        command=(sys.executable, "-c", program),
        endpoint_url=proxy.endpoint_url,
        watch=out,
        **settings,
    ) as run:
        wait_until(
            lambda: bool(run.log("checkpoint.committed")), 3 * HANG_SECONDS, "a snapshot without it is committed"
        )
        stop.touch()
        yield run


def test_a_watched_file_that_the_store_refuses_is_left_out_and_named(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    """Every snapshot would hold it, so none would ever be committed."""
    fault_proxy.add(refusal("InvalidArgument", "refused.bin"))
    out = tmp_path / "out"
    with watched_run(rclone_bucket, fault_proxy, tmp_path) as run:
        assert run.wait() == NOT_DURABLE, run.output()
    assert "not durable: out/refused.bin: " in run.output()
    shutil.rmtree(out)
    restored = keepstep(
        *("restore", rclone_bucket.destination, "--endpoint-url", rclone_bucket.endpoint_url),
        *("--volume", tmp_path / "other", "--watch", out),
    )
    assert restored.returncode == 0, restored.stderr
    assert {path.name for path in out.iterdir()} == {"good.bin", "last.bin"}


@pytest.mark.slow
def test_a_watched_file_at_which_the_store_ends_every_connection_is_left_out_and_named(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    """A proxy on the way may do so to one file. It says nothing, but the store answers otherwise."""
    fault_proxy.add(Rule(name="cut", fault=Fault.RESET_REQUEST, method="PUT", target="refused.bin", times=-1))
    with watched_run(rclone_bucket, fault_proxy, tmp_path, drain_timeout_seconds=3) as run:
        assert run.wait() == NOT_DURABLE, run.output()
    assert "not durable: out/refused.bin: " in run.output()


def test_a_file_that_cannot_be_read_costs_its_checkpoint_and_no_other_until_it_can(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    with AgentProcess(
        tmp_path / "volume",
        rclone_bucket.destination,
        endpoint_url=fault_proxy.endpoint_url,
        module="tests.harness.agent_without_rights",
    ) as agent:
        commit_beside(agent, 1)
        fault_proxy.outage(True)
        path = write_checkpoint(agent.checkpoints / "checkpoint-2", {"unreadable.bin": 2 * MIB, "a.bin": 2 * MIB})
        save = agent.announce(path, 2).save
        # The pin is the same inode.
        (path / "unreadable.bin").chmod(0)
        fault_proxy.outage(False)
        wait_until(lambda: "Permission denied" in named(agent, 2), HANG_SECONDS, "status names it")
        commit_beside(agent, 3, 4)
        (line,) = agent.log("checkpoint.set_aside")
        assert line["path"] == "unreadable.bin"
        (path / "unreadable.bin").chmod(0o644)
        agent.wait_committed(save)
        assert named(agent, 2) == ""
    assert BucketView(rclone_bucket).steps() == [1, 2, 3, 4]


def test_a_watched_file_that_cannot_be_read_and_a_folder_without_an_end_cost_nothing_else(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    if not shutil.which("setpriv"):
        pytest.skip("util-linux has no setpriv here")
    out = tmp_path / "out"
    out.mkdir()
    program = (
        "import pathlib, time\n"
        f"out, stop = pathlib.Path({str(out)!r}), pathlib.Path({str(tmp_path / 'stop')!r})\n"
        # Small, so that it is sent in a pack with others.
        "for name in ('a', 'unreadable', 'z'): (out / name).write_bytes(name.encode() * 100)\n"
        "until = time.monotonic() + 300\n"
        "while not stop.exists() and time.monotonic() < until: time.sleep(0.05)\n"
        "(out / 'last').write_bytes(b'last')\n"
    )
    with (
        endless_folder(tmp_path / "endless") as endless,
        RunProcess(
            tmp_path / "volume",
            rclone_bucket.destination,
            command=(sys.executable, "-c", f"print('began', flush=True)\n{program}"),
            prefix=("setpriv", "--bounding-set=-dac_override,-dac_read_search"),
            endpoint_url=fault_proxy.endpoint_url,
            watch=f"{out}:{endless}",
        ) as run,
    ):
        wait_until(lambda: "began\n" in run.output(), HANG_SECONDS, "the program runs")
        fault_proxy.outage(True)
        wait_until(lambda: bool(run.log("checkpoint.staged")), HANG_SECONDS, "its files are pinned")
        (out / "unreadable").chmod(0)
        fault_proxy.outage(False)
        wait_until(lambda: bool(run.log("checkpoint.committed")), HANG_SECONDS, "a snapshot without it is committed")
        (tmp_path / "stop").touch()
        assert run.wait() == NOT_DURABLE, run.output()
    assert "not durable: endless: it cannot be read: more than " in run.output()
    assert "not durable: out/unreadable: " in run.output()
    shutil.rmtree(out)
    restored = keepstep(
        *("restore", rclone_bucket.destination, "--endpoint-url", rclone_bucket.endpoint_url),
        *("--volume", tmp_path / "other", "--watch", out),
    )
    assert restored.returncode == 0, restored.stderr
    assert {path.name for path in out.iterdir()} == {"a", "z", "last"}
