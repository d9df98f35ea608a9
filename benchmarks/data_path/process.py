"""What a process costs, seen from outside: one rule for every tool.

The clock starts with the tool's first request to the server, so that interpreters and imports are nobody's transfer;
what was spent before is reported as its start-up. It stops when the process has ended, after a download when the file
system has written everything out besides.
"""

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.data_path.server import Counts, Server

_SAMPLE_SECONDS: Final = 0.01
_LONGEST_OUTPUT: Final = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    wall_seconds: float
    cpu_seconds: float
    main_thread_cpu_seconds: float
    """What of it the first thread took: of Keepstep's processes the one with the event loop."""
    start_wall_seconds: float
    start_cpu_seconds: float
    peak_rss_bytes: int
    peak_anonymous_bytes: int
    counts: Counts


class ToolError(Exception):
    """Its exit code, or its end for want of time, with the end of what it said."""


def process_cpu_ns(pid: int) -> int:
    """User and system time of another process, all its threads, to the nanosecond: its POSIX CPU clock on Linux."""
    return time.clock_gettime_ns((~pid) << 3 | 2)


def main_thread_cpu_ns(pid: int) -> int:
    """User and system time of the first thread of another process, which may be a zombie.

    The kernel shows the clocks of threads to their own process alone, but this figure, of its scheduler, to all.
    """
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """In ns, at a time.monotonic_ns()."""

    at: int
    process: int
    main_thread: int


def cpu_times(pid: int) -> CpuTimes:
    """Raises OSError if there is no such process."""
    return CpuTimes(at=time.monotonic_ns(), process=process_cpu_ns(pid), main_thread=main_thread_cpu_ns(pid))


@dataclass(slots=True)
class Watch:
    """Samples a process in a thread until it is told to stop, or the process is gone."""

    pid: int
    peak_rss_bytes: int = 0
    peak_anonymous_bytes: int = 0
    cpu: list[CpuTimes] = field(default_factory=list)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        assert self._thread is not None
        self._stopped.set()
        self._thread.join()

    def cpu_times_at(self, moment_ns: int) -> CpuTimes:
        """Between two samples: by the straight line."""
        before = after = CpuTimes(at=0, process=0, main_thread=0)
        for after in self.cpu:
            if after.at >= moment_ns:
                break
            before = after
        if not before.at or after.at <= before.at:
            return after
        share = min(1.0, (moment_ns - before.at) / (after.at - before.at))
        return CpuTimes(
            at=moment_ns,
            process=round(before.process + share * (after.process - before.process)),
            main_thread=round(before.main_thread + share * (after.main_thread - before.main_thread)),
        )

    def _run(self) -> None:
        while True:
            try:
                self._sample()
            except (OSError, ValueError):
                return
            if self._stopped.wait(_SAMPLE_SECONDS):
                return

    def _sample(self) -> None:
        self.cpu.append(cpu_times(self.pid))
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
        if "VmHWM" in fields:  # a zombie has no memory
            self.peak_rss_bytes = _kib(fields["VmHWM"])
            self.peak_anonymous_bytes = max(self.peak_anonymous_bytes, _kib(fields["RssAnon"]))


def measure(
    command: Sequence[str],
    *,
    server: Server,
    environment: Mapping[str, str],
    log: Path,
    timeout_seconds: float,
    written_to: Path | None = None,
) -> Measurement:
    """Run it to its end. With `written_to`, that file system is synchronised before the clock stops."""
    server.reset()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    started_ns = time.monotonic_ns()
    watch = Watch(process.pid)
    watch.start()
    killer = threading.Timer(timeout_seconds, process.kill)
    killer.start()
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        main_thread_ns = main_thread_cpu_ns(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:  # we are told to end
        process.kill()
        process.wait()
        raise
    finally:
        killer.cancel()
        watch.stop()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        said = log.read_text(errors="replace")[-_LONGEST_OUTPUT:]
        raise ToolError(f"exit code {process.returncode}: {' '.join(command[:4])}\n{said}")
    if written_to is not None:
        synchronise(written_to)
    ended_ns = time.monotonic_ns()
    counts = server.counts()
    start = watch.cpu_times_at(counts.first_request_ns)
    return Measurement(
        wall_seconds=(ended_ns - counts.first_request_ns) / 1e9,
        cpu_seconds=usage.ru_utime + usage.ru_stime - start.process / 1e9,
        main_thread_cpu_seconds=(main_thread_ns - start.main_thread) / 1e9,
        start_wall_seconds=(counts.first_request_ns - started_ns) / 1e9,
        start_cpu_seconds=start.process / 1e9,
        peak_rss_bytes=watch.peak_rss_bytes,
        peak_anonymous_bytes=watch.peak_anonymous_bytes,
        counts=counts,
    )


def synchronise(directory: Path) -> None:
    """Wait until everything on its file system is on disk."""
    subprocess.run(["sync", "--file-system", str(directory)], check=True, timeout=600)


def _kib(text: str) -> int:
    return int(text.split()[0]) * 1024
