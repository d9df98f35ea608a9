"""A real Chromium, and a real console on a real S3 server with runs of every state and hostile names."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.browser.chromium import Browser, chromium, has_axe, why_not
from tests.console.stored_runs import interrupted_run, long_run, run_objects, write
from tests.core.noted_lives import NotedLife
from tests.servers.process import Daemon, wait_until
from tests.servers.rclone import RcloneServer
from tests.servers.server import Bucket

from keepstep_agent.core.model import Kind

DAY = 24 * 3600.0
HOSTILE = (
    "<img src=x onerror=window.obeyed=1>",
    "<script>window.obeyed=1<|script>".replace("|", ""),
    '"><svg onload=window.obeyed=1>',
    "javascript:window.obeyed=1",
    "{{ 7 * 7 }}",
    "\u202eesrever",
    "a b+c%2fd#e?f&name=g",
    "long-" + 40 * "name-",
)


class ConsoleProcess:
    """A real `keepstep console` of what is in the bucket, on a port that the system chooses."""

    def __init__(self, bucket: Bucket, log: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "keepstep_agent", "console", bucket.destination, "--address", "127.0.0.1:0"]
        command += ["--endpoint-url", bucket.endpoint_url, "--refresh-every", "1s", *arguments]
        self._daemon = Daemon(command, log)
        wait_until(lambda: bool(self._said()) or not self._daemon.running(), "the console listens")
        assert self._daemon.running(), log.read_text()
        self.address = self._said()

    def stop(self) -> None:
        self._daemon.stop()

    def _said(self) -> str:
        lines = self._daemon.log.read_text().splitlines(keepends=True)
        return next((line.strip() for line in lines if line.startswith("http://") and line.endswith("\n")), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What the browser looks at. `folder` is the destination, as the server keeps it on disk."""

    browser: Browser
    console: ConsoleProcess
    folder: Path
    bucket: Bucket

    def open(self, path: str = "") -> None:
        """Open a page, and wait until the console has read all runs."""
        wait_until(lambda: self._opened(path), "all runs are read")

    def _opened(self, path: str) -> bool:
        self.browser.open(self.console.address + path)
        return "Looking for runs" not in (said := self.browser.text()) and "Reading the runs" not in said


@pytest.fixture(scope="module")
def opened_browser() -> Iterator[Browser]:
    if reason := why_not():
        pytest.skip(reason)
    with chromium() as browser:
        yield browser


@pytest.fixture
def browser(opened_browser: Browser) -> Browser:
    opened_browser.forget()
    return opened_browser


@pytest.fixture
def axe() -> None:
    if not has_axe():
        pytest.skip("no axe-core: make node")


@pytest.fixture
def shown(
    browser: Browser, rclone_server: RcloneServer, rclone_bucket: Bucket, tmp_path: Path
) -> Iterator[Callable[..., Shown]]:
    """Return a function that starts a console with these arguments, and the browser beside it."""
    folder = rclone_server.directory / rclone_bucket.name / rclone_bucket.prefix
    consoles: list[ConsoleProcess] = []

    def show(*arguments: str) -> Shown:
        write_runs(folder)
        console = ConsoleProcess(rclone_bucket, tmp_path / "console.log", *arguments)
        consoles.append(console)
        return Shown(browser=browser, console=console, folder=folder, bucket=rclone_bucket)

    yield show
    for console in consoles:
        console.stop()


def write_runs(folder: Path) -> None:
    """Write a run of every state, one that nobody can read, and those with hostile names."""
    now = time.time()
    write(folder, "teams/interrupted/", interrupted_run())
    write(folder, "teams/running/", long_run(30, began_at=now - 30 * 600.0))
    write(folder, "teams/complete/", run_objects(steps={500: now - 3600.0}, kinds={500: Kind.FINAL}))
    write(folder, "teams/stopped/", run_objects([_ended(now - 600.0).life], steps={100: now - 700.0}))
    write(folder, "teams/abandoned/", run_objects(steps={100: now - 30 * DAY}))
    write(folder, "teams/unreadable/", {".keepstep/commits/999999999899.save-100.json": (b"{", now)})
    for name in HOSTILE:
        write(folder, f"hostile/{name}/", run_objects(steps={100: now - 60.0}))


def _ended(at: float) -> NotedLife:
    life = NotedLife("agent-1", attempt="<b>attempt</b>")
    life.start(at - 300.0)
    life.ranks(at - 290.0, 1)
    life.save(at - 110.0, at - 105.0, 100)
    life.commit(at - 100.0, 100)
    life.ranks(at - 10.0, 0)
    life.end(at)
    return life
