"""Who is who at an API server of a test: its own certificate, its admin's, and the key that signs service accounts'
tokens."""

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from tests.servers.tls import Certificate, make_certificate

_ADMINS: Final = "system:masters"
"""The group that may do everything, whatever RBAC says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """PEM files. `serving` is its own CA, for 127.0.0.1; `clients` is the CA of the admin's certificate.

    `token_key` is in SEC 1 ("EC PRIVATE KEY"): kube-apiserver reads the public half of `--service-account-key-file`
    by Go's `ParseECPrivateKey` alone, to which a PKCS#8 key is no key at all (client-go, util/keyutil).
    """

    serving: Certificate
    clients: Path
    admin: Certificate
    token_key: Path


def make_credentials(folder: Path) -> Credentials:
    key, admin_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = _certificate(_name("clients"), _name("clients"), key, key, authority=True)
    admin = _certificate(_name("admin", _ADMINS), _name("clients"), admin_key, key, authority=False)
    serving = make_certificate(folder / "serving")
    paths = {name: folder / name for name in ("clients.pem", "admin.pem", "admin-key.pem", "token-key.pem")}
    paths["clients.pem"].write_bytes(authority.public_bytes(Encoding.PEM))
    paths["admin.pem"].write_bytes(admin.public_bytes(Encoding.PEM))
    paths["admin-key.pem"].write_bytes(_pem(admin_key))
    paths["token-key.pem"].write_bytes(_pem(ec.generate_private_key(ec.SECP256R1())))
    return Credentials(
        serving=serving,
        clients=paths["clients.pem"],
        admin=Certificate(certificate=paths["admin.pem"], key=paths["admin-key.pem"]),
        token_key=paths["token-key.pem"],
    )


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    authority: bool,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    )
    if not authority:
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _name(user: str, group: str = "") -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, user)]
    if group:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
    return x509.Name(attributes)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
