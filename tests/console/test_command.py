"""`keepstep console` as it is started: where it listens, whom it refuses to serve, that it writes nothing and ends."""

import signal
import time
from pathlib import Path

import pytest
from tests.console.stored_runs import interrupted_run, long_run, put, run_objects, write
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.console_process import ConsoleProcess
from tests.harness.warm_python import keepstep
from tests.podsim.volumes import write_atomically
from tests.servers.fault_proxy import FaultProxy
from tests.servers.server import Bucket

from keepstep_agent.adapters.open_store import open_store

TOKEN = "0123456789abcdef0123"


async def test_runs_in_a_bucket_are_shown_and_brought_up_to_date_without_a_write(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    now = time.time()
    async with open_store(rclone_bucket.settings()) as store:
        await put(store, "team/one/", interrupted_run())
        await put(store, "two/", long_run(3, began_at=now - 1860))
    endpoint = f"--endpoint-url={fault_proxy.endpoint_url}"
    with ConsoleProcess(tmp_path, rclone_bucket.destination, endpoint) as console:
        wait_until(lambda: "72.6%" in console.get("")[1], HANG_SECONDS, "the runs are read")
        wait_until(lambda: "step 300" in console.get("run?name=two")[1], HANG_SECONDS, "the other run is read")
        async with open_store(rclone_bucket.settings()) as store:
            await put(store, "two/", run_objects(steps={900: now}))
            await put(store, "three/", interrupted_run())
        wait_until(lambda: "step 900" in console.get("run?name=two")[1], HANG_SECONDS, "the new checkpoint is shown")
        wait_until(lambda: console.get("run?name=three")[0] == 200, HANG_SECONDS, "the new run is shown")
        assert console.end(signal.SIGTERM) == 0
        assert "Traceback" not in console.log_text()
    assert {request.method for request in fault_proxy.log} == {"GET"}


def test_a_directory_is_shown_and_an_interrupt_ends_it(tmp_path: Path) -> None:
    write(tmp_path / "bucket", "one/", interrupted_run())
    before = sorted(tmp_path.joinpath("bucket").rglob("*"))
    with ConsoleProcess(tmp_path / "log", f"file://{tmp_path}/bucket") as console:
        wait_until(lambda: "72.6%" in console.get("")[1], HANG_SECONDS, "the run is read")
        assert console.address.startswith("http://127.0.0.1:")
        assert console.end(signal.SIGINT) == 0
    assert sorted(tmp_path.joinpath("bucket").rglob("*")) == before


def test_a_destination_that_is_missing_is_said_on_the_page_until_it_is_there(tmp_path: Path) -> None:
    with ConsoleProcess(tmp_path / "log", f"file://{tmp_path}/bucket") as console:
        wait_until(lambda: "does not exist" in console.get("")[1], HANG_SECONDS, "the page says it")
        assert console.get("readyz")[0] == 503
        write(tmp_path / "bucket", "one/", interrupted_run())
        wait_until(lambda: "72.6%" in console.get("")[1], HANG_SECONDS, "the run is read")


def test_a_token_that_is_replaced_in_its_file_counts_and_the_old_one_no_more(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    write_atomically(tmp_path / "token", {"token": TOKEN})
    option = f"--token-file={tmp_path}/token/token"
    with ConsoleProcess(tmp_path / "log", f"file://{tmp_path}/bucket", option) as console:

        def status(token: str) -> int:
            return console.get("api/runs", {"Authorization": f"Bearer {token}"})[0]

        assert status(TOKEN) == 200
        write_atomically(tmp_path / "token", {"token": "short"})
        wait_until(lambda: "token.unusable" in console.log_text(), HANG_SECONDS, "it says that the token is too short")
        assert (status(TOKEN), status("short")) == (200, 401)
        write_atomically(tmp_path / "token", {"token": TOKEN[::-1]})
        wait_until(lambda: status(TOKEN[::-1]) == 200, HANG_SECONDS, "the new token counts")
        assert status(TOKEN) == 401
        assert TOKEN[::-1] not in console.log_text()


def test_a_token_is_asked_for_and_never_told(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    write(tmp_path / "bucket", "one/", interrupted_run())
    with ConsoleProcess(tmp_path / "log", f"file://{tmp_path}/bucket", f"--token-file={tmp_path}/token") as console:
        console.wait_ready()
        status, page = console.get("")  # it was led to the form
        assert (status, "<h1>Sign in</h1>" in page, "bucket" in page) == (200, True, False)
        assert console.get("api/runs")[0] == 401
        status, body = console.get("api/runs", {"Authorization": f"Bearer {TOKEN}"})
        assert (status, TOKEN in body) == (200, False)
        assert console.end(signal.SIGTERM) == 0
        assert TOKEN not in console.log_text()


@pytest.mark.parametrize(
    ("options", "token", "error", "hint"),
    [
        (["--address", ":8400"], None, "would show all runs to whoever reaches this machine", "--token-file"),
        (["--address", "0.0.0.0:8400"], None, "would show all runs", "or listen on 127.0.0.1"),
        (["--address", "[::]:8400"], None, "would show all runs", "or listen on 127.0.0.1"),
        (["--address", ":8400", "--user-header", "X-User"], None, "could send the header X-User", "--trusted-proxy"),
        ([], "short", "has 5 characters, fewer than 16", "openssl rand -hex 32"),
        ([], "", "has 0 characters", "openssl rand -hex 32"),
        (["--token-file", "/nowhere/token"], None, "No such file", "openssl rand -hex 32"),
    ],
)
def test_what_would_be_open_to_all_is_refused_with_a_hint(
    tmp_path: Path, options: list[str], token: str | None, error: str, hint: str
) -> None:
    if token is not None:
        (tmp_path / "token").write_text(token)
        options = [*options, "--token-file", f"{tmp_path}/token"]
    done = keepstep("console", f"file://{tmp_path}", *options)
    assert (done.returncode, done.stdout) == (1, "")
    said = done.stderr.splitlines()
    assert error in said[0]
    assert hint in said[1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--address", "8400"], "is not host:port"),
        (["--user-header", "X User"], "is no name of a header"),
        (["--trusted-proxy", "proxy.example"], "write 10.0.0.7 or 10.0.0.0/8"),
        (["--refresh-every", "0.5s"], "give at least 1s"),
        (["--abandoned-after", "soon"], "is not a duration"),
    ],
)
def test_an_option_that_means_nothing_says_what_to_write(tmp_path: Path, options: list[str], says: str) -> None:
    done = keepstep("console", f"file://{tmp_path}", *options)
    assert done.returncode == 2
    assert says in done.stderr


def test_a_port_that_is_taken_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with ConsoleProcess(tmp_path / "log", f"file://{tmp_path}") as console:
        address = console.address.removeprefix("http://").rstrip("/")
        done = keepstep("console", f"file://{tmp_path}", "--address", address)
    assert done.returncode == 1
    assert f"cannot listen on {address}" in done.stderr
    assert "hint: give --address as host:port with a free port" in done.stderr
