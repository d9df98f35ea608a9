"""moto's server: honours conditions, verifies neither checksums nor signatures."""

import sys
from pathlib import Path

from tests.servers.process import Daemon, free_port


class MotoServer:
    """Keeps everything in memory; `directory` is for its log."""

    def __init__(self, directory: Path) -> None:
        self.ca_bundle: Path | None = None
        self.port = free_port()
        self.endpoint_url = f"http://127.0.0.1:{self.port}"
        self._directory = directory
        self._daemon: Daemon | None = None

    @property
    def pid(self) -> int:
        assert self._daemon, "not started"
        return self._daemon.pid

    def start(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._daemon = Daemon(command, self._directory / "moto.log")
        self._daemon.wait_for_port(self.port)

    def stop(self) -> None:
        if self._daemon:
            self._daemon.stop()
            self._daemon = None
