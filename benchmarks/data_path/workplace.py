"""A temporary folder with the server, the sources and a fresh subfolder for each job; all of it is gone at the end."""

import itertools
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.data_path.build import Programs, build
from benchmarks.data_path.certificate import make_certificate
from benchmarks.data_path.process import synchronise
from benchmarks.data_path.server import Server
from benchmarks.data_path.tools import Job
from tests.harness.agent_process import write_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    directory: Path
    sources: Path
    programs: Programs
    server: Server
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @contextmanager
    def job(self, *, upload: bool, secure: bool) -> Iterator[Job]:
        """What was written for it is removed, and forgotten by the disk, before the next."""
        name = f"job-{next(self._numbers)}"
        work = self.directory / name
        work.mkdir()
        try:
            yield Job(
                server=self.server, secure=secure, upload=upload, sources=self.sources, prefix=f"{name}/x", work=work
            )
        finally:
            shutil.rmtree(work)
            synchronise(self.directory)


@contextmanager
def open_workplace(sizes: Mapping[str, int]) -> Iterator[Workplace]:
    """`sizes` of the source files by name; they are in the page cache and on disk when it is entered."""
    with tempfile.TemporaryDirectory(prefix="keepstep-data-path-") as name:
        directory = Path(name)
        sources = write_checkpoint(directory / "sources", sizes)
        synchronise(directory)
        programs = build(directory)
        server = Server(
            programs.server,
            sources=sources,
            spool=directory / "spool",
            certificate=make_certificate(directory / "tls"),
        )
        with server:
            yield Workplace(directory=directory, sources=sources, programs=programs, server=server)
