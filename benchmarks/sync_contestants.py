"""Who keeps the program's files in `benchmarks.beside_sync`: Keepstep in two ways, and loops of sync commands."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from tests.harness.agent_process import AgentProcess, wait_until
from tests.harness.run_process import RunProcess
from tests.harness.warm_python import warm_keepstep
from tests.servers.fault_proxy import FaultProxy
from tests.servers.rclone import RcloneServer, find_rclone
from tests.servers.server import ENVIRONMENT, Bucket, make_bucket

PROGRAM: Final = "benchmarks.saving_program"
Kill = Callable[[], None]
_ENVIRONMENT: Final = {**ENVIRONMENT, "AWS_REGION": "us-east-1"}
_WAIT_SECONDS: Final = 240.0
_RCLONE_FOUND_NOTHING: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """The disk of one life. `endpoint_url`: of the proxy that counts what is sent."""

    folder: Path
    bucket: Bucket
    endpoint_url: str

    @property
    def output(self) -> Path:
        return self.folder / "out"

    @property
    def volume(self) -> Path:
        return self.folder / "volume"

    @property
    def said(self) -> Path:
        """What the program prints."""
        return self.folder / "said"

    def command(self, write_seconds: float, train_seconds: float) -> tuple[str, ...]:
        words = [sys.executable, "-m", PROGRAM, str(self.output), str(write_seconds), str(train_seconds)]
        return "sh", "-c", f"exec {shlex.join(words)} > {shlex.quote(str(self.said))}"

    def logs(self) -> str:
        """Return what the agent, the runner or the loop said."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))

    def wait_begun(self) -> None:
        wait_until(
            lambda: self.said.exists() and "resumed " in self.said.read_text(), _WAIT_SECONDS, "the program begins"
        )

    def last_saved(self) -> int:
        """The step of the last save that was complete, be it of this life or restored."""
        lines = self.said.read_text().splitlines()
        return max(int(line.split()[1]) for line in lines if line.startswith(("saved ", "resumed ")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One server for all, and a proxy before it."""

    folder: Path
    server: RcloneServer
    proxy: FaultProxy

    def life(self, label: str, chain: int, number: int, bucket: Bucket | None = None) -> Life:
        """Return an empty disk, and a fresh bucket unless there is one."""
        folder = self.folder / f"{label}-{chain}-{number}"
        folder.mkdir()
        return Life(folder=folder, bucket=bucket or make_bucket(self.server), endpoint_url=self.proxy.endpoint_url)

    def sent_bytes(self, buckets: Collection[str]) -> int:
        """The bodies of all requests to these buckets."""
        return sum(one.body_bytes for one in list(self.proxy.log) if one.path.split("/")[1] in buckets)


class Contestant(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def label(self) -> str:
        """A short name for paths."""

    def begun(self, life: Life, write_seconds: float, train_seconds: float) -> AbstractContextManager[Kill]:
        """Start the program, and what keeps its files; give the function that kills it."""

    def restore(self, life: Life) -> None:
        """Bring back what is stored, to a life whose disk is empty."""


class MachineKilled:
    """An agent, which dies with the program."""

    name: Final = "Keepstep, machine killed"
    label: Final = "m"

    @contextmanager
    def begun(self, life: Life, write_seconds: float, train_seconds: float) -> Iterator[Kill]:
        agent = AgentProcess(
            life.volume,
            life.bucket.destination,
            environment=_ENVIRONMENT,
            endpoint_url=life.endpoint_url,
            watch=life.output,
        )
        with agent, _program(life.command(write_seconds, train_seconds)) as program:
            life.wait_begun()

            def kill() -> None:
                program.kill()
                agent.process.kill()
                program.wait(_WAIT_SECONDS)
                agent.process.wait(_WAIT_SECONDS)

            yield kill

    def restore(self, life: Life) -> None:
        _restore(life)


class ProgramKilled:
    """`keepstep run`, of which the program alone is killed."""

    name: Final = "Keepstep, program killed"
    label: Final = "r"

    @contextmanager
    def begun(self, life: Life, write_seconds: float, train_seconds: float) -> Iterator[Kill]:
        run = RunProcess(
            life.volume,
            life.bucket.destination,
            environment=_ENVIRONMENT,
            command=life.command(write_seconds, train_seconds),
            endpoint_url=life.endpoint_url,
            watch=life.output,
        )
        with run:
            life.wait_begun()

            def kill() -> None:
                for pid, line in run.children().items():
                    if f" {PROGRAM} " in line:
                        os.kill(pid, signal.SIGKILL)
                assert run.wait(_WAIT_SECONDS) == 128 + signal.SIGKILL, run.output()

            yield kill

    def restore(self, life: Life) -> None:
        _restore(life)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A command that syncs, again and again; it dies with the program.

    `sync` and `back` make the commands from a life. `found_nothing` says whether a failure of `back` means that there
    is nothing yet.
    """

    name: str
    label: str
    interval_seconds: float
    sync: Callable[[Life], Sequence[str]]
    back: Callable[[Life], Sequence[str]]
    found_nothing: Callable[["subprocess.CompletedProcess[str]"], bool]

    @contextmanager
    def begun(self, life: Life, write_seconds: float, train_seconds: float) -> Iterator[Kill]:
        # rclone fails if the directory is missing.
        life.output.mkdir(exist_ok=True)
        script = f"while :; do {shlex.join(self.sync(life))}; sleep {self.interval_seconds:g}; done"
        with (life.folder / "loop.log").open("wb") as log, _program(life.command(write_seconds, train_seconds)) as one:
            loop = subprocess.Popen(
                ["sh", "-c", script],
                env={**os.environ, **_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

            def kill() -> None:
                one.kill()
                with suppress(ProcessLookupError):
                    os.killpg(loop.pid, signal.SIGKILL)
                one.wait(_WAIT_SECONDS)
                loop.wait(_WAIT_SECONDS)

            try:
                life.wait_begun()
                yield kill
            finally:
                kill()

    def restore(self, life: Life) -> None:
        life.output.mkdir()
        result = subprocess.run(
            self.back(life),
            env={**os.environ, **_ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=_WAIT_SECONDS,
            check=False,
        )
        assert result.returncode == 0 or self.found_nothing(result), result.stderr


def loops(interval_seconds: float) -> list[Loop]:
    """Return a loop of `rclone sync`, and one of `s5cmd sync` if that is installed."""
    found = [_rclone(interval_seconds)]
    s5cmd = shutil.which("s5cmd")
    return [*found, _s5cmd(s5cmd, interval_seconds)] if s5cmd else found


def _rclone(interval_seconds: float) -> Loop:
    def command(verb: str, life: Life) -> list[str]:
        store = ["--s3-provider=Rclone", "--s3-env-auth", f"--s3-endpoint={life.endpoint_url}"]
        return [find_rclone(), verb, "--config=", "--retries=1", *store]

    def remote(life: Life) -> str:
        return f":s3:{life.bucket.name}/{life.bucket.prefix}"

    return Loop(
        name=f"rclone sync each {interval_seconds:g} s",
        label="c",
        interval_seconds=interval_seconds,
        sync=lambda life: [*command("sync", life), str(life.output), remote(life)],
        back=lambda life: [*command("copy", life), remote(life), str(life.output)],
        found_nothing=lambda result: result.returncode == _RCLONE_FOUND_NOTHING,
    )


def _s5cmd(program: str, interval_seconds: float) -> Loop:
    def command(life: Life) -> list[str]:
        return [program, "--log=error", f"--endpoint-url={life.endpoint_url}"]

    return Loop(
        name=f"s5cmd sync each {interval_seconds:g} s",
        label="s",
        interval_seconds=interval_seconds,
        sync=lambda life: [*command(life), "sync", "--delete", f"{life.output}/", f"{life.bucket.destination}/"],
        back=lambda life: [*command(life), "cp", f"{life.bucket.destination}/*", f"{life.output}/"],
        found_nothing=lambda result: "no object found" in result.stderr,
    )


@contextmanager
def _program(command: Sequence[str]) -> Iterator["subprocess.Popen[bytes]"]:
    program = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield program
    finally:
        program.kill()
        program.wait(_WAIT_SECONDS)


def _restore(life: Life) -> None:
    words = ["-m", "keepstep_agent", "restore", life.bucket.destination, f"--endpoint-url={life.endpoint_url}"]
    result = warm_keepstep().run(
        [*words, f"--volume={life.volume}", f"--watch={life.output}"],
        environment={**os.environ, **_ENVIRONMENT},
        timeout_seconds=_WAIT_SECONDS,
    )
    assert result.returncode == 0, result.stderr
