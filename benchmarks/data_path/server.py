"""The C store as a child process, and what it has counted."""

import json
import re
import subprocess
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlencode

from benchmarks.data_path.certificate import Certificate

_REQUEST_SECONDS: Final = 30.0
_ENTRY: Final = re.compile(r"<Key>(.*?)</Key>.*?<Size>(\d+)</Size>")
_BODIES_IN_QUESTION: Final = 0.5
"""A check that came with fewer of the bodies than this is not the tool's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Since the last reset. `first_request_ns` is a time.monotonic_ns(), 0 without a request."""

    requests: int
    connections: int
    bytes_in: int
    bytes_out: int
    bodies: int
    first_request_ns: int
    checks: Mapping[str, int]

    def check(self) -> str:
        """What came with the bodies for the store to verify them by; empty: nothing, or no bodies."""
        return " + ".join(name for name, count in self.checks.items() if count > self.bodies * _BODIES_IN_QUESTION)


class Server:
    """Serves while the context is open. The files in `sources` are the objects bench/src/<name>."""

    def __init__(self, program: Path, *, sources: Path, spool: Path, certificate: Certificate) -> None:
        self._command = [str(program), str(sources), str(spool), str(certificate.certificate), str(certificate.key)]
        self._spool = spool
        self.ca_bundle = certificate.authority
        self._ports: tuple[int, int] = (0, 0)
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._spool.mkdir()
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        plain, secure = self._process.stdout.readline().split()
        self._ports = (int(plain), int(secure))
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate(timeout=_REQUEST_SECONDS)

    def port(self, *, secure: bool) -> int:
        return self._ports[secure]

    def endpoint_url(self, *, secure: bool) -> str:
        return f"{'https' if secure else 'http'}://127.0.0.1:{self.port(secure=secure)}"

    def reset(self) -> None:
        self._ask("__stats/reset")

    def counts(self) -> Counts:
        return Counts(**self._ask("__stats"))

    def limit(self, bytes_per_second: int) -> None:
        """What it receives of all connections together, of those that are opened from now on; 0: no limit."""
        self._ask(f"__rate/{bytes_per_second}")

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of the objects in bucket bench below `prefix`, by key."""
        found: dict[str, int] = {}
        while True:
            query = urlencode({"list-type": 2, "prefix": prefix, "continuation-token": max(found, default="")})
            url = f"{self.endpoint_url(secure=False)}/bench?{query}"
            with urllib.request.urlopen(url, timeout=_REQUEST_SECONDS) as answer:
                page = answer.read().decode()
            found |= {key: int(size) for key, size in _ENTRY.findall(page)}
            if "<IsTruncated>false" in page:
                return found

    def _ask(self, path: str) -> Any:
        url = f"{self.endpoint_url(secure=False)}/{path}"
        with urllib.request.urlopen(url, timeout=_REQUEST_SECONDS) as answer:
            return json.load(answer)
