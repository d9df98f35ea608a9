"""How a TLS connection of our own begins, or does not, on both event loops."""

import asyncio
import socket
import ssl
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.harness.tls_peer import Peer, Recorder, Run, on_both_loops
from tests.servers.tls import Certificate, make_certificate

from keepstep_agent.adapters.transfer.tls_connector import open_tls_connection
from keepstep_agent.core.settings.values import MIB


@on_both_loops
def test_a_handshake_with_a_stranger_fails_and_leaves_no_socket(
    run: Run, certificate: Certificate, tmp_path: Path
) -> None:
    stranger = make_certificate(tmp_path / "stranger")

    async def greet() -> None:
        peer = Peer(stranger, lambda connection: None)
        peer.start()
        plain = await asyncio.to_thread(socket.create_connection, peer.address)
        plain.setblocking(False)
        context = ssl.create_default_context(cafile=str(certificate.certificate))
        with pytest.raises(ssl.SSLCertVerificationError):
            await open_tls_connection(Recorder(), plain, context, "127.0.0.1")
        await asyncio.to_thread(peer.join, HANG_SECONDS)
        assert isinstance(peer.error, OSError)

    run(greet())


@on_both_loops
def test_a_server_that_closes_in_the_handshake_is_a_broken_connection_and_no_wrong_certificate(run: Run) -> None:
    async def greet() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            plain = await asyncio.to_thread(socket.create_connection, listener.getsockname())
            plain.setblocking(False)
            greeting = asyncio.create_task(
                open_tls_connection(Recorder(), plain, ssl.create_default_context(), "127.0.0.1")
            )
            closing = (await asyncio.to_thread(listener.accept))[0]
            with closing:
                closing.settimeout(HANG_SECONDS)
                while len(await asyncio.to_thread(closing.recv, MIB)) == MIB:
                    pass
            with pytest.raises(ConnectionResetError, match="during the TLS handshake"):
                await greeting

    run(greet())


@on_both_loops
def test_a_handshake_that_is_given_up_leaves_no_socket(run: Run, certificate: Certificate) -> None:
    async def greet() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            plain = await asyncio.to_thread(socket.create_connection, listener.getsockname())
            plain.setblocking(False)
            greeting = asyncio.create_task(
                open_tls_connection(Recorder(), plain, ssl.create_default_context(), "127.0.0.1")
            )
            silent = (await asyncio.to_thread(listener.accept))[0]
            with silent:
                silent.settimeout(HANG_SECONDS)
                assert await asyncio.to_thread(silent.recv, 1)
                greeting.cancel()
                await asyncio.wait([greeting])
                while await asyncio.to_thread(silent.recv, MIB):
                    pass

    run(greet())
