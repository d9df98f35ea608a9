"""The certificate that the webhook serves with, and its change while it serves.

Owns the TLS contexts: one that listens, and for each pair a new one that its connections are handed on to. To load a
pair into a context that serves is two steps, and a connection that begins between them has a certificate without its
key. A pair of files that does not fit together is left alone and said: the one before it still serves.
"""

import asyncio
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog
from cryptography import x509

from mooring_agent.core.errors import ErrorKind, MooringError

_FILES: Final = ("tls.crt", "tls.key")  # as cert-manager names them
_OWN_FILE: Final = "own.pem"
"""Certificate and key that we made, in one file, which changes as a whole; it outlives a container that ends."""
_LOOK_SECONDS: Final = 5.0

log = structlog.get_logger("mooring.webhook")


class ServingCertificate:
    """`context` serves whatever was loaded last; connections that are open keep what they began with."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: list[bytes] = []
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.sni_callback = self._hand_on
        self._serving: ssl.SSLContext | None = None
        self.expires_at: datetime | None = None

    def put(self, pair: bytes) -> None:
        """Serve with this certificate and its key, in PEM. Raises MooringError where the folder cannot be written."""
        if self._loaded == [pair]:
            return
        made = self._folder / f"{_OWN_FILE}.new"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            made.touch(0o600)
            made.write_bytes(pair)
            made.replace(self._folder / _OWN_FILE)
        except OSError as error:
            raise MooringError(
                ErrorKind.BAD_CONFIGURATION,
                f"the certificates cannot be written to {self._folder}: {error}",
                hint="with --self-managed the folder must be writable: an emptyDir, no Secret",
            ) from error
        self.load()

    def load(self) -> None:
        """Take what is in the folder. Raises MooringError where there is none that can serve."""
        own = self._folder / _OWN_FILE
        files = [own] if own.exists() else [self._folder / name for name in _FILES]
        try:
            found = [path.read_bytes() for path in files]
            if found == self._loaded:
                return
            fresh = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            fresh.minimum_version = ssl.TLSVersion.TLSv1_2
            fresh.load_cert_chain(files[0], files[-1])
            expires_at = x509.load_pem_x509_certificate(found[0]).not_valid_after_utc
        except (OSError, ValueError) as error:
            raise MooringError(
                ErrorKind.BAD_CONFIGURATION,
                f"no certificate to serve with in {self._folder}: {error}",
                hint=f"put {' and '.join(_FILES)} there, in PEM, or use --self-managed",
            ) from error
        self._serving, self._loaded, self.expires_at = fresh, found, expires_at
        log.info("certificate.loaded", expires_at=expires_at.isoformat())

    async def keep_loading(self) -> None:
        """For ever. A Secret's volume changes by a link's change, which a look at the bytes sees in any case."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await asyncio.to_thread(self.load)
            except MooringError as error:
                log.error("certificate.unusable", error=str(error), hint=error.hint)

    def seconds_left(self) -> float:
        """Until it expires; negative when it has, and where there is none."""
        return float("-inf") if self.expires_at is None else (self.expires_at - datetime.now(UTC)).total_seconds()

    def _hand_on(self, connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _listener: ssl.SSLContext) -> None:
        """With each ClientHello, whether it names a server or not."""
        if self._serving is not None:
            connection.context = self._serving
