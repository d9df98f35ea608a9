"""The certificate that the webhook serves, read from a mounted Secret and again when that changes."""

import asyncio
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog
from cryptography import x509

from keepstep_agent.core.errors import ErrorKind, KeepstepError

_FILES: Final = ("tls.crt", "tls.key")
_LOOK_SECONDS: Final = 5.0

log = structlog.get_logger("keepstep.webhook")


class ServingCertificate:
    """`context` serves the newest certificate loaded; open connections keep theirs. Made with the one that is there:
    raises KeepstepError if none can serve."""

    _serving: ssl.SSLContext
    expires_at: datetime

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: list[bytes] = []
        self._is_expired = False
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.sni_callback = self._hand_on
        self.load()

    def load(self) -> None:
        """Load the certificate from the folder if it has changed. Raises KeepstepError if none can serve."""
        files = [self._folder / name for name in _FILES]
        try:
            found = [path.read_bytes() for path in files]
            if found == self._loaded:
                self._say_expired()
                return
            fresh = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            fresh.minimum_version = ssl.TLSVersion.TLSv1_2
            fresh.load_cert_chain(files[0], files[1])
            expires_at = x509.load_pem_x509_certificate(found[0]).not_valid_after_utc
        except (OSError, ValueError) as error:
            raise KeepstepError(
                ErrorKind.BAD_CONFIGURATION,
                f"no certificate to serve with in {self._folder}: {error}",
                hint=f"put {' and '.join(_FILES)} there, in PEM; in the chart, `keepstep certificates` or cert-manager "
                "writes the Secret that is mounted there",
            ) from error
        self._serving, self._loaded, self.expires_at = fresh, found, expires_at
        log.info("certificate.loaded", expires_at=expires_at.isoformat())
        self._is_expired = False
        self._say_expired()

    async def keep_loading(self) -> None:
        """Reload for ever. Kubernetes updates a Secret's volume by changing a link, so the bytes are compared."""
        problem = ""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await asyncio.to_thread(self.load)
                problem = ""
            except KeepstepError as error:
                if str(error) != problem:
                    problem = str(error)
                    log.error("certificate.unusable", error=problem, hint=error.hint)

    def seconds_left(self) -> float:
        """Return the seconds until it expires; negative if it has expired."""
        return (self.expires_at - datetime.now(UTC)).total_seconds()

    def _say_expired(self) -> None:
        """Once."""
        if not self._is_expired and self.seconds_left() <= 0:
            self._is_expired = True
            log.error(
                "certificate.expired",
                expires_at=self.expires_at.isoformat(),
                hint="API servers refuse it; look at the Jobs that renew it, and at the clock",
            )

    def _hand_on(self, connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _listener: ssl.SSLContext) -> None:
        """Switch a new connection to the newest certificate. Called at each ClientHello, also without a server name."""
        connection.context = self._serving
