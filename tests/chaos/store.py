"""The store of one episode: a real S3 server that can be killed and stopped, and a proxy in front that breaks HTTP."""

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.servers.ceph import CephServer, missing_programs
from tests.servers.fault_proxy import FaultProxy
from tests.servers.moto import MotoServer
from tests.servers.rclone import RcloneServer
from tests.servers.seaweedfs import SeaweedServer
from tests.servers.server import Bucket, make_bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """`verifies`: it refuses a body that is not what its checksum says. `end` is None if it forgets all it has."""

    make: Callable[[Path], Any]
    verifies: bool
    end: Callable[[Any, signal.Signals], None] | None
    start_again: Callable[[Any], None]


KINDS: Mapping[str, Kind] = {
    "seaweedfs": Kind(
        make=SeaweedServer,
        verifies=True,
        end=lambda server, number: server.stop(number),
        start_again=lambda server: server.start(),
    ),
    "rclone": Kind(
        make=lambda directory: RcloneServer(directory / "data"),
        verifies=False,
        end=lambda server, number: server.stop(number),
        start_again=lambda server: server.start(),
    ),
    "moto": Kind(make=MotoServer, verifies=False, end=None, start_again=lambda server: server.start()),
    "ceph": Kind(
        make=CephServer,
        verifies=True,
        end=lambda server, number: server.end_gateway(number),
        start_again=lambda server: server.start_gateway(),
    ),
}


def available() -> list[str]:
    """Ceph where its packages are installed."""
    return [name for name in KINDS if name != "ceph" or not missing_programs()]


class Store:
    """Started at once; `bucket` is the direct way to it, `proxy` the one that agents take."""

    def __init__(self, name: str, seed: int) -> None:
        self.kind = KINDS[name]
        # Unix sockets lie in it, which need short paths.
        self._directory = Path(tempfile.mkdtemp(prefix="chaos-store-"))
        self._server = self.kind.make(self._directory)
        # A server dies with the thread that started it, so this one stays; SeaweedFS takes seconds to elect itself.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="chaos-store")
        self._running = False
        self.lives = 0
        try:
            self._starter.submit(self._server.start).result()
            self._started()
            self.bucket: Bucket = make_bucket(self._server)
            self.proxy = FaultProxy(self._server.port, seed=seed)
            self.proxy.start()
        except BaseException:
            self._server.stop()
            self._starter.shutdown()
            raise

    @property
    def running(self) -> bool:
        return self._running

    def end(self, number: signal.Signals) -> None:
        """SIGKILL or SIGTERM."""
        assert self.kind.end, "it would forget everything"
        self.kind.end(self._server, number)
        self._running = False

    def start_again(self) -> "Future[None]":
        """Begin to, unless it runs."""
        return self._starter.submit(self._start_again)

    def _start_again(self) -> None:
        if not self._running:
            self.kind.start_again(self._server)
            self._started()

    def signal(self, number: signal.Signals) -> None:
        """SIGSTOP or SIGCONT."""
        if self._running:
            os.kill(self._server.pid, number)

    def close(self) -> None:
        with contextlib.suppress(AttributeError):
            self.proxy.stop()
        self._server.stop()
        self._starter.shutdown()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _started(self) -> None:
        self._running = True
        self.lives += 1
