"""Programs that take the flags of etcd and kube-apiserver and are nearly neither, for tests of what starts those.

python -m tests.cluster.stand_in etcd|kube-apiserver --flag=value …
"""

import http.server
import ssl
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


class _Handler(http.server.BaseHTTPRequestHandler):
    """Says whom it takes the caller for."""

    def do_GET(self) -> None:
        connection: Any = self.connection
        subject = dict(pair for (pair,) in connection.getpeercert()["subject"])
        body = {"/readyz": "ok"}.get(self.path, f"{subject['commonName']} of {subject['organizationName']}").encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


def _etcd(flags: dict[str, str]) -> None:
    port = urlsplit(flags["listen-client-urls"]).port
    assert port is not None
    http.server.HTTPServer(("127.0.0.1", port), _Handler).serve_forever()


def _api_server(flags: dict[str, str]) -> None:
    Path(flags["service-account-signing-key-file"]).read_text()
    server = http.server.HTTPServer((flags["bind-address"], int(flags["secure-port"])), _Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(flags["tls-cert-file"], flags["tls-private-key-file"])
    context.load_verify_locations(flags["client-ca-file"])
    context.verify_mode = ssl.CERT_REQUIRED
    # In the request's turn: who only looks whether the port is open shall not hold up the rest.
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    server.serve_forever()


if __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    if arguments == ["--help"]:
        print("  --unsafe-no-fsync")
    else:
        flags = dict(argument.removeprefix("--").split("=", 1) for argument in arguments)
        {"etcd": _etcd, "kube-apiserver": _api_server}[program](flags)
