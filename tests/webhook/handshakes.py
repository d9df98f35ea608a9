"""TLS handshakes in memory, and what serves in them."""

import ssl
from pathlib import Path

from keepstep_agent.webhook.certificates import CertificateWithKey
from keepstep_agent.webhook.serving_certificate import ServingCertificate


def serving(folder: Path, pair: CertificateWithKey) -> ssl.SSLContext:
    """What the webhook serves with, from this folder."""
    (folder / "tls.crt").write_bytes(pair.certificate_pem)
    (folder / "tls.key").write_bytes(pair.key_pem)
    return ServingCertificate(folder).context


def shake_hands(server_context: ssl.SSLContext, bundle: bytes, name: str) -> None:
    """The client as strict as it can be. Raises ssl.SSLError."""
    trusting = ssl.create_default_context(cadata=bundle.decode())
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(back, there, server_hostname=name)
    server = server_context.wrap_bio(there, back, server_side=True)
    for _ in range(3):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert client.version() == "TLSv1.3"
