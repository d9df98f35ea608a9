"""The certificate that the webhook serves with, and its change while it serves.

Owns the TLS context. A pair of files that does not fit together is left alone and said: the one before it still serves.
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
        self.expires_at: datetime | None = None

    def load(self) -> bool:
        """Take what is in the folder; whether it is new. Raises MooringError where there is none that can serve."""
        certificate, key = self._folder / CERTIFICATE_FILE, self._folder / KEY_FILE
        try:
            found = (certificate.read_bytes(), key.read_bytes())
            if found == self._loaded:
                return False
            # First into one that nobody uses: half of a change must not take down what serves.
            _context().load_cert_chain(certificate, key)
            if found != (certificate.read_bytes(), key.read_bytes()):
                return False  # it is changing just now; the next look takes it
            expires_at = x509.load_pem_x509_certificate(found[0]).not_valid_after_utc
            self.context.load_cert_chain(certificate, key)
        except (OSError, ValueError) as error:
            raise MooringError(
                ErrorKind.BAD_CONFIGURATION,
                f"no certificate to serve with in {self._folder}: {error}",
                hint=f"put {CERTIFICATE_FILE} and {KEY_FILE} there, in PEM, or use --self-managed",
            ) from error
        self._loaded, self.expires_at = found, expires_at
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

    def seconds_left(self) -> float:
        """Until it expires; negative when it has."""
        assert self.expires_at is not None, "loaded before anybody asks"
        return (self.expires_at - datetime.now(UTC)).total_seconds()


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
