"""Plays the twelve stories at once on one machine, with a real S3 server, until somebody has seen enough.

Every run is an ordinary program under `keepstep run`. Each start gets an empty volume, as on a new machine. Ending the
fleet ends all its processes: what is still training is told to end, and saves just in time.
"""

import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from examples.demo.processes import Child, child, environment_for, find_rclone, read_along, s3_server
from examples.demo.timeline import Timeline
from examples.fleet.stories import STORIES, End, Start, Story

from keepstep_agent.core.errors import ErrorKind, KeepstepError

_BUCKET: Final = "keepstep-fleet"
_DESTINATION: Final = f"s3://{_BUCKET}/teams"
_PROGRAM: Final = Path(__file__).with_name("train.py")
_ACCESS_KEY: Final = "fleet"
_SECRET_KEY: Final = "fleet-secret"
_AT_ONCE: Final = 4
"""How many short-lived programs run at a time: two cores suffice for them."""
_ENDING_SECONDS: Final = 60.0
_REFRESH_SECONDS: Final = 2
_ABANDONED_AFTER_SECONDS: Final = 300
"""Instead of days, so that the run that nobody goes on with can be seen as such."""
_NAME_WIDTH: Final = max(len(story.name) for story in STORIES)


def show_fleet(*, limit_seconds: float, keep: bool) -> None:
    """Play all stories. Return after Ctrl-C or when the time is up, and everything has ended.

    The folder is removed, unless `keep`. Raises KeepstepError if the fleet cannot start.
    """
    if find_rclone() is None:
        raise KeepstepError(
            ErrorKind.BAD_CONFIGURATION,
            "the fleet serves a real bucket, and needs rclone",
            hint="start it by `make fleet`, which installs it",
        )
    folder = Path(tempfile.mkdtemp(prefix="keepstep-fleet-"))
    timeline = Timeline()
    try:
        (folder / "bucket" / _BUCKET).mkdir(parents=True)
        server = s3_server(
            folder / "bucket",
            log=folder / "s3-server.log",
            access_key=_ACCESS_KEY,
            secret_key=_SECRET_KEY,
            limit_seconds=limit_seconds + 2 * _ENDING_SECONDS,
        )
        with suppress(KeyboardInterrupt), server as url:
            timeline.say(f"an S3 server runs on {url.removeprefix('http://')} (rclone serve s3)")
            fleet = _Fleet(folder, timeline, environment_for(folder, url, _ACCESS_KEY, _SECRET_KEY), limit_seconds)
            with fleet.console() as pages:
                fleet.introduce(pages)
                fleet.play()
        timeline.say("all processes have ended")
    finally:
        if keep:
            timeline.plain(f"Kept: bucket, logs and volumes in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


class _Fleet:
    """The runs. Each start is played by a thread of its own; once the fleet is ending, none begins any more."""

    def __init__(self, folder: Path, timeline: Timeline, environment: dict[str, str], limit_seconds: float) -> None:
        self._folder = folder
        self._timeline = timeline
        self._environment = environment
        self._limit_seconds = limit_seconds
        self._lock = threading.Lock()
        self._ending = False
        self._living: set[Child] = set()

    @contextmanager
    def console(self) -> Iterator[str]:
        """Run the console. Yields the address of its pages. Raises KeepstepError if it does not start."""
        log = self._folder / "console.log"
        command = [sys.executable, "-m", "keepstep_agent", "console", _DESTINATION, "--address", "127.0.0.1:0"]
        command += ["--refresh-every", f"{_REFRESH_SECONDS}s", "--abandoned-after", f"{_ABANDONED_AFTER_SECONDS}s"]
        limit_seconds = self._limit_seconds + 2 * _ENDING_SECONDS
        with child(command, log=log, environment=self._environment, limit_seconds=limit_seconds) as program:
            for line in program.lines():
                yield line.strip()
                return
            raise KeepstepError(
                ErrorKind.UNREACHABLE,
                f"the console did not start: {log.read_text(errors='replace').strip()[-300:]}",
                hint="start it by `make fleet`, which installs what it needs",
            )

    def introduce(self, pages: str) -> None:
        """Say where the runs are, and how to look at them with other commands."""
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "KEEPSTEP_S3_ENDPOINT_URL")
        exports = [f"export {name}={shlex.quote(self._environment[name])}\n" for name in names]
        (self._folder / "environment").write_text("".join(exports))
        keepstep = f"{sys.executable} -m keepstep_agent"
        self._timeline.say(f"{len(STORIES)} runs begin below {_DESTINATION}; this page shows them:")
        self._timeline.plain(f"  {pages}", style="bold")
        self._timeline.plain(f"  in another shell:  . {self._folder}/environment; {keepstep} report {_DESTINATION}")

    def play(self) -> None:
        """Play all stories until the time is up. Raises what went wrong with one of them."""
        until = time.monotonic() + self._limit_seconds
        # First come, first served: all runs begin before one of them begins again.
        waiting = deque((story, story.starts) for story in STORIES)
        playing: dict[Future[None], tuple[Story, tuple[Start, ...]]] = {}
        with ThreadPoolExecutor(len(STORIES)) as threads:
            try:
                while (waiting or playing) and time.monotonic() < until:
                    while waiting and sum(starts[0].is_short for _, starts in playing.values()) < _AT_ONCE:
                        story, starts = waiting.popleft()
                        playing[threads.submit(self._play_start, story, starts[0])] = story, starts
                        if story is STORIES[-1] and starts == story.starts:
                            self._timeline.say("all runs have begun")
                    for ended in wait(playing, until - time.monotonic(), FIRST_COMPLETED).done:
                        ended.result()
                        story, starts = playing.pop(ended)
                        if starts[1:]:
                            waiting.append((story, starts[1:]))
            finally:
                self._end(list(playing))

    def _end(self, playing: list[Future[None]]) -> None:
        """Tell every program to end, and kill what has not after a while."""
        # A second Ctrl-C would leave processes behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with self._lock:
            self._ending = True
            living = list(self._living)
        self._timeline.say(f"ending: {len(living)} programs save just in time")
        for program in living:
            program.terminate()
        if wait(playing, timeout=_ENDING_SECONDS).not_done:
            for program in living:
                program.lose_power()

    def _play_start(self, story: Story, start: Start) -> None:
        """Run the program once."""
        with self._started(story, start) as program:

            def on_step(step: int, loss: float) -> None:
                if step == start.step and start.end is End.NOTICE:
                    program.terminate()
                elif step == start.step and start.end is End.POWER:
                    program.lose_power()

            trained = read_along(program, on_step)
        at = f" at step {start.step}" if start.step else ""
        told = "ends with the fleet" if self._ending else f"{start.end}{at}"
        self._timeline.say(f"{story.name:<{_NAME_WIDTH}}  {told}; exit code {trained.exit_code}")

    @contextmanager
    def _started(self, story: Story, start: Start) -> Iterator[Child]:
        name = story.name.replace("/", "-")
        machine = self._folder / "machines" / name
        shutil.rmtree(machine, ignore_errors=True)
        (self._folder / "logs").mkdir(exist_ok=True)
        running = child(
            _command(story, start, machine),
            log=self._folder / "logs" / f"{name}.log",
            environment=self._environment,
            limit_seconds=self._limit_seconds + _ENDING_SECONDS,
        )
        with running as program:
            with self._lock:
                self._living.add(program)
                # It came too late to be told by the end of the fleet.
                if self._ending:
                    program.terminate()
            try:
                yield program
            finally:
                with self._lock:
                    self._living.discard(program)


def _command(story: Story, start: Start, machine: Path) -> list[str]:
    command = [sys.executable, "-m", "keepstep_agent", "run", "--to", f"{_DESTINATION}/{story.name}"]
    command += ["--volume", str(machine / "volume"), "--log-format", "json", *story.options]
    program = [sys.executable, str(_PROGRAM), "--steps", str(story.steps), "--save-every", str(story.save_every)]
    program += ["--step-seconds", str(story.step_seconds), "--state-kib", str(story.state_kib)]
    if start.end is End.ERROR:
        program += ["--fail-after", str(start.step)]
    if not story.knows_keepstep:
        output = machine / "output"
        command += ["--watch", str(output)]
        program += ["--output", str(output)]
    return [*command, "--", *program]
