"""What the agent costs in memory while it uploads 4 GiB, and once that is done; before it, see `benchmarks.idle`.

    python -m benchmarks.memory

A real agent uploads four files of 1 GiB, with the default part size and concurrency, to an HTTP server of this program
on loopback that knows just enough of S3 and keeps no byte of a part. Prints a table and exits 1 if a goal is missed.
Needs 4 GiB of free disk below the temporary directory, and writes nothing elsewhere.
"""

import os
import re
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

from tests.harness.agent_process import AgentProcess, write_checkpoint
from tests.servers.server import ENVIRONMENT

MIB: Final = 1024 * 1024
FILES: Final = 4
FILE_BYTES: Final = 1024 * MIB
ANONYMOUS_GOAL_MIB: Final = 120
IDLE_RSS_GOAL_MIB: Final = 100
UPLOAD_SECONDS: Final = 600.0
SETTLE_SECONDS: Final = 5.0
SAMPLE_SECONDS: Final = 0.02
_READ_BYTES: Final = 256 * 1024


class Sink(BaseHTTPRequestHandler):
    """Takes parts and forgets them; keeps small objects, and of large ones their size."""

    protocol_version = "HTTP/1.1"
    small: dict[str, bytes] = {}  # noqa: RUF012 - one bucket for all connections
    sizes: dict[str, int] = {}  # noqa: RUF012
    uploads: dict[str, int] = {}  # noqa: RUF012
    lock = threading.Lock()

    def do_PUT(self) -> None:
        size = int(self.headers["Content-Length"])
        if "Expect" in self.headers:
            self.send_response_only(100)
            self.end_headers()
        path, query = self._target()
        if "partNumber" in query:
            self._discard(size)
            with self.lock:
                self.uploads[query["uploadId"]] += size
        else:
            body = self.rfile.read(size)
            with self.lock:
                self.small[path], self.sizes[path] = body, size
        self._answer(200, etag=True)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, query = self._target()
        if "uploads" in query:
            upload = secrets.token_hex(8)
            self.uploads[upload] = 0
            body = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
        else:
            with self.lock:
                self.sizes[path] = self.uploads.pop(query["uploadId"])
            body = '<CompleteMultipartUploadResult><ETag>"etag"</ETag></CompleteMultipartUploadResult>'
        self._answer(200, body.encode())

    def do_GET(self) -> None:
        path, query = self._target()
        if "list-type" in query:
            prefix = f"{path}/{query.get('prefix', '')}"
            rows = "".join(
                f"<Contents><Key>{key.removeprefix(path + '/')}</Key><Size>{size}</Size><ETag>etag</ETag>"
                "<LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
                for key, size in sorted(self.sizes.items())
                if key.startswith(prefix)
            )
            answer = f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
            self._answer(200, answer.encode())
        elif "uploads" in query:
            self._answer(
                200, b"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated></ListMultipartUploadsResult>"
            )
        elif path in self.small:
            self._answer(200, self.small[path], etag=True)
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def do_DELETE(self) -> None:
        path, _ = self._target()
        with self.lock:
            self.small.pop(path, None)
            self.sizes.pop(path, None)
        self._answer(204)

    def log_message(self, *_: object) -> None:
        """Nothing: the table is the output."""

    def _target(self) -> tuple[str, Mapping[str, str]]:
        url = urlsplit(self.path)
        return url.path, {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}

    def _discard(self, size: int) -> None:
        buffer = memoryview(bytearray(_READ_BYTES))
        while size:
            count = self.rfile.readinto(buffer[: min(size, _READ_BYTES)])
            if not count:
                raise ConnectionError("the agent hung up")
            size -= count

    def _answer(self, status: int, body: bytes = b"", *, etag: bool = False) -> None:
        self.send_response(status)
        if etag:
            self.send_header("ETag", '"etag"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class SinkServer(ThreadingHTTPServer):
    """One thread per connection; none of them keeps the program alive."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Only the agent's end breaks a connection; an upload that fails is seen by the missing commit."""


def sample(agent: AgentProcess) -> tuple[int, int]:
    """(anonymous, resident) MiB now."""
    text = Path(f"/proc/{agent.process.pid}/status").read_text()
    found = dict(re.findall(r"(RssAnon|VmRSS):\s+(\d+) kB", text))
    return int(found["RssAnon"]) // 1024, int(found["VmRSS"]) // 1024


def settled(agent: AgentProcess) -> tuple[int, int]:
    """The last of the samples of some seconds in which nothing is asked of it."""
    ends_at = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < ends_at:
        time.sleep(SAMPLE_SECONDS)
    return sample(agent)


def measure(directory: Path, endpoint_url: str) -> tuple[list[tuple[str, int, int]], float]:
    """Rows of (when, anonymous MiB, resident MiB) and how long the upload took in seconds."""
    rows = []
    with AgentProcess(
        directory / "volume", "s3://bench/run", environment=ENVIRONMENT, endpoint_url=endpoint_url
    ) as agent:
        sizes = {f"shard-{number}.bin": FILE_BYTES for number in range(FILES)}
        source = write_checkpoint(agent.checkpoints / "checkpoint-1", sizes)
        began = time.monotonic()
        agent.announce(source, 1)
        peak_anonymous = peak_resident = 0
        while agent.log("checkpoint.committed") == []:
            assert time.monotonic() - began < UPLOAD_SECONDS, agent.log_text()[-2000:]
            assert agent.process.poll() is None, agent.log_text()[-2000:]
            anonymous, resident = sample(agent)
            peak_anonymous, peak_resident = max(peak_anonymous, anonymous), max(peak_resident, resident)
            time.sleep(SAMPLE_SECONDS)
        seconds = time.monotonic() - began
        rows.append(("uploading, peak", peak_anonymous, peak_resident))
        rows.append(("idle after", *settled(agent)))
    return rows, seconds


def main() -> int:
    server = SinkServer(("127.0.0.1", 0), Sink)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with tempfile.TemporaryDirectory(prefix="keepstep-memory-") as directory:
            rows, seconds = measure(Path(directory), f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
    size_bytes = FILES * FILE_BYTES
    print(f"{size_bytes // MIB} MiB in {seconds:.1f} s ({size_bytes / MIB / seconds:.0f} MiB/s), {os.cpu_count()} CPUs")
    print(f"{'':18}{'anonymous MiB':>15}{'RSS MiB':>10}")
    missed = False
    for when, anonymous, resident in rows:
        too_much = resident > IDLE_RSS_GOAL_MIB if when.startswith("idle") else anonymous > ANONYMOUS_GOAL_MIB
        missed |= too_much
        print(f"{when:18}{anonymous:>15}{resident:>10}{'  goal missed' if too_much else ''}")
    print(f"goals: {ANONYMOUS_GOAL_MIB} MiB anonymous while uploading, {IDLE_RSS_GOAL_MIB} MiB resident when idle")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
