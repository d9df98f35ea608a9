"""etcd and kube-apiserver as processes of the test, on loopback: a cluster without nodes and without controllers.

Nothing runs in it, no Job makes a pod, no namespace is ever gone; what it shows is what an API server takes, defaults,
refuses, and asks a webhook. The binaries are where `KUBEBUILDER_ASSETS` says, as for every test by controller-runtime's
envtest, whose flags these are (controller-runtime, pkg/internal/testing/controlplane).
"""

import os
import ssl
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self

from tests.cluster.api import Api, ApiError
from tests.cluster.credentials import Credentials, make_credentials
from tests.harness.bounds import HANG_SECONDS
from tests.servers.process import Daemon, free_port, wait_until

ASSETS_VARIABLE: Final = "KUBEBUILDER_ASSETS"
_BINARIES: Final = ("etcd", "kube-apiserver")
_NO_PROXY: Final = {**dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), ""), "NO_PROXY": "*"}
"""Go would ask a proxy for the webhook's Service."""


class NoAssetsError(Exception):
    """There are no binaries. `told`: somebody named a folder for them, so that this is a mistake."""

    def __init__(self, message: str, *, told: bool) -> None:
        super().__init__(message)
        self.told = told


def find_assets(value: str | None) -> Path:
    """The folder that the variable names. Raises NoAssetsError."""
    if not value:
        wanted = " and ".join(_BINARIES)
        raise NoAssetsError(f"{ASSETS_VARIABLE} names no folder with {wanted}: no real API server here", told=False)
    folder = Path(value)
    missing = [name for name in _BINARIES if not os.access(folder / name, os.X_OK)]
    if missing:
        raise NoAssetsError(f"{ASSETS_VARIABLE} is {folder}, which has no {' and no '.join(missing)}", told=True)
    return folder


def etcd_command(binary: Path, folder: Path, port: int, peer_port: int, *, syncs: bool) -> list[str]:
    """`syncs`: an old one cannot be told not to."""
    url = f"http://127.0.0.1:{port}"
    command = [
        str(binary),
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls=http://127.0.0.1:{peer_port}",
    ]
    return command if syncs else [*command, "--unsafe-no-fsync=true"]


def api_server_command(binary: Path, folder: Path, credentials: Credentials, port: int, etcd_port: int) -> list[str]:
    return [
        str(binary),
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        # Only published, and never called; without it a machine with no way out would have none to publish.
        "--advertise-address=192.0.2.1",
        "--service-cluster-ip-range=10.0.0.0/24",
        "--allow-privileged=true",
        "--authorization-mode=RBAC",
        # Nobody makes the service account that every pod would have to have.
        "--disable-admission-plugins=ServiceAccount",
        f"--cert-dir={folder / 'api-server'}",
        f"--tls-cert-file={credentials.serving.certificate}",
        f"--tls-private-key-file={credentials.serving.key}",
        f"--client-ca-file={credentials.clients}",
        f"--service-account-issuer=https://127.0.0.1:{port}/",
        f"--service-account-key-file={credentials.token_key}",
        f"--service-account-signing-key-file={credentials.token_key}",
    ]


class ControlPlane:
    """While the context is open it runs; `folder` keeps its data and its logs."""

    def __init__(self, assets: Path, folder: Path) -> None:
        self._assets = assets
        self._folder = folder
        self._credentials = make_credentials(folder)
        self._port = free_port()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            etcd_port = free_port()
            etcd = self._assets / "etcd"
            syncs = "unsafe-no-fsync" not in _help(etcd)
            self._start(stack, etcd_command(etcd, self._folder, etcd_port, free_port(), syncs=syncs), etcd_port)
            binary = self._assets / "kube-apiserver"
            command = api_server_command(binary, self._folder, self._credentials, self._port, etcd_port)
            daemon = self._start(stack, command, self._port)

            def settled() -> bool:
                assert daemon.running(), daemon.log.read_text(errors="replace")[-4000:]
                return self._ready()

            wait_until(settled, "kube-apiserver is ready", HANG_SECONDS)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._port}"

    @property
    def authority(self) -> Path:
        """The API server's."""
        return self._credentials.serving.certificate

    def api(self) -> Api:
        """As the admin."""
        context = ssl.create_default_context(cafile=self.authority)
        context.load_cert_chain(self._credentials.admin.certificate, self._credentials.admin.key)
        return Api("127.0.0.1", self._port, context)

    def _ready(self) -> bool:
        try:
            return self.api().get_text("/readyz") == "ok"
        except (ApiError, OSError):
            return False

    def _start(self, stack: ExitStack, command: list[str], port: int) -> Daemon:
        daemon = Daemon(command, self._folder / f"{Path(command[0]).name}.log", _NO_PROXY)
        stack.callback(daemon.stop)
        daemon.wait_for_port(port, HANG_SECONDS)
        return daemon


def _help(binary: Path) -> str:
    done = subprocess.run([binary, "--help"], capture_output=True, text=True, timeout=HANG_SECONDS)
    return done.stdout + done.stderr
