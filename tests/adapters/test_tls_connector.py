"""Which TLS a store's connections have: ours where aiohttp connects directly, the loop's own behind a proxy."""

import asyncio
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.harness.tls_peer import Run, on_both_loops
from tests.regions import make_file, region_of
from tests.servers.server import Bucket
from tests.servers.tls import Certificate

from keepstep_agent.adapters.checksum import region_checksum
from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.adapters.transfer.tls_transport import TlsTransport
from keepstep_agent.core.settings.values import MIB


@on_both_loops
def test_a_store_behind_tls_is_reached_by_it(
    run: Run, rclone_tls_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiohttp is told by what is no promise of its: if it stops listening, uploads cost twice as much."""
    region = region_of(make_file(tmp_path / "file", 2 * MIB))
    lent = []
    really_lend = TlsTransport.lend

    async def lend(self: TlsTransport, *arguments: Any) -> int:
        lent.append(self)
        return await really_lend(self, *arguments)

    monkeypatch.setattr(TlsTransport, "lend", lend)

    async def put() -> None:
        async with open_store(rclone_tls_bucket.settings()) as store:
            await store.put_data("a", region, region_checksum(region))

    run(put())
    assert lent


@on_both_loops
@pytest.mark.parametrize("proxy_scheme", ["http", "https"])
def test_through_a_proxy_the_loops_own_tls_does_the_same(
    proxy_scheme: str,
    run: Run,
    rclone_tls_bucket: Bucket,
    certificate: Certificate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = make_file(tmp_path / "file", 5 * MIB + 3)
    region, into = region_of(path), tmp_path / "into"
    asked: list[bytes] = []
    context = None
    if proxy_scheme == "https":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.certificate, certificate.key)

    async def tunnel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0])
        host, port = asked[-1].split()[1].decode().split(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.gather(_pass_on(reader, far_writer), _pass_on(far_reader, writer))

    async def there_and_back() -> None:
        async with await asyncio.start_server(tunnel, "127.0.0.1", 0, ssl=context) as proxy:
            port = proxy.sockets[0].getsockname()[1]
            monkeypatch.setenv("HTTPS_PROXY", f"{proxy_scheme}://127.0.0.1:{port}")
            async with open_store(rclone_tls_bucket.settings()) as store:
                await store.put_data("a", region, region_checksum(region))
                version = (await store.head("a")).version
                with into.open("wb") as file:
                    await store.get_into(
                        "a", offset_bytes=0, size_bytes=region.size_bytes, version=version, descriptor=file.fileno()
                    )

    run(there_and_back())
    assert asked
    assert {line.split()[0] for line in asked} == {b"CONNECT"}
    assert into.read_bytes() == path.read_bytes()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(MIB):
            writer.write(data)
            await writer.drain()
    writer.close()
