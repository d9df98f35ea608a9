"""The certificate that the webhook serves with, and its change while it serves.

Owns the TLS contexts: one that listens, and for each pair of files a new one that its connections are handed on to. To
load a pair into a context that serves is two steps, and a connection that begins between them has a certificate without
its key. A pair of files that does not fit together is left alone and said: the one before it still serves.
"""

import asyncio
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog
from cryptography import x509

from mooring_agent.core.errors import ErrorKind, MooringError

CERTIFICATE_FILE: Final = "tls.crt"
KEY_FILE: Final = "tls.key"
_LOOK_SECONDS: Final = 5.0

log = structlog.get_logger("mooring.webhook")


class ServingCertificate:
    """`context` serves whatever was loaded last; connections that are open keep what they began with."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: tuple[bytes, bytes] | None = None
        self.context = _context()
        self.context.sni_callback = self._hand_on
        self._serving: ssl.SSLContext | None = None
        self.expires_at: datetime | None = None

    def load(self) -> bool:
        """Take what is in the folder; whether it is new. Raises MooringError where there is none that can serve."""
        certificate, key = self._folder / CERTIFICATE_FILE, self._folder / KEY_FILE
        try:
            found = (certificate.read_bytes(), key.read_bytes())
            if found == self._loaded:
                return False
            fresh = _context()
            fresh.load_cert_chain(certificate, key)
            if found != (certificate.read_bytes(), key.read_bytes()):
                return False  # it is changing just now; the next look takes it
            expires_at = x509.load_pem_x509_certificate(found[0]).not_valid_after_utc
        except (OSError, ValueError) as error:
            raise MooringError(
                ErrorKind.BAD_CONFIGURATION,
                f"no certificate to serve with in {self._folder}: {error}",
                hint=f"put {CERTIFICATE_FILE} and {KEY_FILE} there, in PEM, or use --self-managed",
            ) from error
        self._serving, self._loaded, self.expires_at = fresh, found, expires_at
        log.info("certificate.loaded", expires_at=expires_at.isoformat())
        return True

    async def keep_loading(self) -> None:
        """For ever. A Secret's volume changes by a link's change, which a look at the bytes sees in any case."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await asyncio.to_thread(self.load)
            except MooringError as error:
                log.error("certificate.unusable", error=str(error), hint=error.hint)

    def _hand_on(self, connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _listener: ssl.SSLContext) -> None:
        """With each ClientHello, whether it names a server or not."""
        if self._serving is not None:
            connection.context = self._serving

    def seconds_left(self) -> float:
        """Until it expires; negative when it has."""
        assert self.expires_at is not None, "loaded before anybody asks"
        return (self.expires_at - datetime.now(UTC)).total_seconds()


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
