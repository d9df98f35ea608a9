"""A real webhook in a process of its own, for tests and benchmarks. Every wait is bounded."""

import http.client
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

from cryptography import x509
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.servers.process import free_port
from tests.servers.tls import make_certificate

IMAGE: Final = "registry.example/keepstep:1"


class WebhookProcess:
    """`folder` gets the certificates and the log. `launcher`: a command that runs the webhook's, such as taskset.
    `module`: what is run in the place of the program itself. `host`: where it listens; empty: on all addresses."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        launcher: Sequence[str] = (),
        module: str = "keepstep_agent",
        host: str = "127.0.0.1",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port, self.http_port = free_port(), free_port()
        self.certificates = folder / "certificates"
        self.authority = folder
        """The CA of the certificate that was put there last."""
        self.folder = folder
        self._log_path = folder / "webhook.log"
        self._command = [
            *launcher,
            *(sys.executable, "-m", module, "webhook"),
            f"--image={IMAGE}",
            f"--certificates={self.certificates}",
            f"--listen={host}:{self.port}",
            f"--http-listen={host}:{self.http_port}",
            *arguments,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._connections: list[http.client.HTTPSConnection] = []

    def __enter__(self) -> Self:
        self.put_certificate(self.make_certificate())
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(HANG_SECONDS)

    def start(self, *, wait: bool = True) -> None:
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        if wait:
            self.wait_serving()

    def wait_serving(self) -> None:
        wait_until(self._serves, HANG_SECONDS, "the webhook serves")

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None, "not started"
        return self._process

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Its exit code."""
        return self.process.wait(HANG_SECONDS)

    def log_text(self) -> str:
        return self._log_path.read_text()

    def make_certificate(self) -> Path:
        """The CA of a new one, to be put in place."""
        made = make_certificate(self.folder / f"certificate-{len(list(self.folder.glob('certificate-*')))}")
        shutil.copy(made.certificate, made.certificate.with_name("tls.crt"))
        shutil.copy(made.key, made.key.with_name("tls.key"))
        return made.certificate

    def put_certificate(self, authority: Path) -> None:
        """As kubelet does it: by the change of one link."""
        self.authority = authority
        link = self.folder / "link"
        link.symlink_to(authority.parent)
        link.replace(self.certificates)

    def connect(self, *authorities: Path) -> http.client.HTTPSConnection:
        """By these CAs, or the newest. Closed with the webhook, at the latest."""
        context = ssl.create_default_context(cafile=self.authority if not authorities else authorities[0])
        for authority in authorities[1:]:
            context.load_verify_locations(authority)
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=HANG_SECONDS, context=context)
        self._connections.append(connection)
        return connection

    def get(self, path: str) -> tuple[int, str]:
        """Of the port for probes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=HANG_SECONDS)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def served(self) -> x509.Certificate:
        """What it serves with now, whoever trusts it."""
        return x509.load_pem_x509_certificate(
            ssl.get_server_certificate(("127.0.0.1", self.port), timeout=HANG_SECONDS).encode()
        )

    def _serves(self) -> bool:
        assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.log_text()}"
        try:
            return self.get("/readyz")[0] == 200
        except OSError:
            return False


def review_of(pod: dict[str, Any], uid: str = "1") -> dict[str, Any]:
    """As the API server sends it."""
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": uid,
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "namespace": "research",
            "operation": "CREATE",
            "userInfo": {"username": "system:serviceaccount:kube-system:job-controller"},
            "object": pod,
            "oldObject": None,
            "dryRun": False,
        },
    }


def training_pod(**annotations: str) -> dict[str, Any]:
    """One container; `annotations` on top of those that ask for the injection, with `_` for `-`."""
    asked = {"inject": "true", "destination": "s3://bucket/runs/one"}
    asked |= {name.replace("_", "-"): text for name, text in annotations.items()}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "train-",
            "annotations": {f"keepstep.dev/{name}": text for name, text in asked.items()},
        },
        "spec": {"restartPolicy": "Never", "containers": [{"name": "trainer", "image": "registry.example/train:1"}]},
    }
