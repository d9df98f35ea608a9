"""A one-node Ceph with its S3 gateway on loopback: the real thing, in memory, up in seconds.

One monitor, one OSD on memstore, one radosgw, no manager, no authentication between them. Works as an ordinary user.
Needs the Debian packages ceph-mon, ceph-osd, ceph-common and radosgw.
"""

import shutil
import signal
import subprocess
import uuid
from pathlib import Path

from tests.harness.bounds import HANG_SECONDS
from tests.servers.process import Daemon, free_port, wait_until
from tests.servers.server import ACCESS_KEY, SECRET_KEY

_PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
_TRIES = 10
_NOT_ASKED = "problem getting command descriptions"
"""A busy monitor turned the program away before it could ask for anything."""
_CONFIGURATION = """
[global]
fsid = {fsid}
mon host = [v1:127.0.0.1:{monitor_port}]
auth cluster required = none
auth service required = none
auth client required = none
public network = 127.0.0.0/8
cluster network = 127.0.0.0/8
ms bind msgr2 = false
mon allow pool size one = true
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon max pg per osd = 1000
run dir = {directory}/run
admin socket = {directory}/run/$name.asok
log file = {directory}/log/$name.log
pid file = {directory}/run/$name.pid
[mon]
mon data = {directory}/mon
mon initial members = a
mon data avail crit = 1
mon data avail warn = 2
paxos propose interval = 0.02
paxos min wait = 0.01
mon osd report timeout = 86400
[osd]
osd data = {directory}/osd
osd objectstore = memstore
osd class update on start = false
osd crush update on start = false
memstore device bytes = 4294967296
osd class load list = *
osd class default list = *
osd op threads = 2
[client]
keyring = {directory}/keyring
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw enable usage log = false
rgw gc obj min wait = 1
rgw thread pool size = 32
rgw dns name = s3.localhost
"""


def missing_programs() -> list[str]:
    return [program for program in _PROGRAMS if not shutil.which(program)]


class CephServer:
    """`directory` must be short: the daemons put unix sockets below it."""

    def __init__(self, directory: Path) -> None:
        self.ca_bundle: Path | None = None
        self.port = free_port()
        self.endpoint_url = f"http://127.0.0.1:{self.port}"
        self._directory = directory
        self._daemons: list[Daemon] = []

    def start(self) -> None:
        directory, fsid, monitor_port = self._directory, str(uuid.uuid4()), free_port()
        for name in ("mon", "osd", "run", "log"):
            (directory / name).mkdir(parents=True)
        (directory / "ceph.conf").write_text(
            _CONFIGURATION.format(fsid=fsid, monitor_port=monitor_port, port=self.port, directory=directory)
        )
        keyring, monitor_map = f"{directory}/keyring", f"{directory}/monmap"
        self._run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        capabilities = [word for name in ("mon", "osd", "mgr") for word in ("--cap", name, "allow *")]
        self._run("ceph-authtool", keyring, "--gen-key", "-n", "client.admin", *capabilities)
        address = f"[v1:127.0.0.1:{monitor_port}]"
        self._run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, monitor_map)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monitor_map, "--keyring", keyring)
        self._daemon("ceph-mon", "-i", "a").wait_for_port(monitor_port)
        osd = str(uuid.uuid4())
        self._run("ceph", "osd", "new", osd)
        self._run("ceph", "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=one")
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._daemon("ceph-osd", "-i", "0")
        self.start_gateway()
        keys = ("--access-key", ACCESS_KEY, "--secret-key", SECRET_KEY)
        self._run("radosgw-admin", "user", "create", "--uid", "test", "--display-name", "test", *keys)
        wait_until(lambda: all(daemon.running() for daemon in self._daemons), "Ceph runs")

    @property
    def pid(self) -> int:
        """The gateway's."""
        return self._daemons[-1].pid

    def start_gateway(self) -> None:
        self._daemon("radosgw", "-n", "client.rgw").wait_for_port(self.port)

    def end_gateway(self, signal_number: int = signal.SIGKILL) -> None:
        """What it has acknowledged is the OSD's, and stays."""
        self._daemons.pop().stop(signal_number)

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.stop()
        self._daemons.clear()

    def _daemon(self, program: str, *arguments: str) -> Daemon:
        command = [program, "-c", f"{self._directory}/ceph.conf", "-f", *arguments]
        daemon = Daemon(command, self._directory / "log" / f"{program}.out")
        self._daemons.append(daemon)
        return daemon

    def _run(self, program: str, *arguments: str) -> None:
        options = [] if program in ("ceph-authtool", "monmaptool") else ["-c", f"{self._directory}/ceph.conf"]
        for _ in range(_TRIES):
            result = subprocess.run(
                [program, *options, *arguments], capture_output=True, text=True, timeout=HANG_SECONDS, check=False
            )
            if result.returncode == 0:
                return
            if _NOT_ASKED not in result.stderr:
                break
        raise RuntimeError(f"{program} {' '.join(arguments)}: {result.stderr[-2000:]}")
