"""Certificates and their keys: how a CA and a leaf are made, and how they are written.

Owns what is in them. API servers (Go) and our tests (OpenSSL) look for a CA by its name, and at key identifiers where
names are the same: so every CA has a name of its own, and both identifiers are there. Keys are EC P-256, which every
API server since 1.16 takes and which cost a webhook with many short connections least.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from mooring_agent.core.certificate_plan import Lives, leaf_ends_at

_COMMON_NAME: Final = "mooring-webhook"
"""A leaf's: nobody reads it, and a Service's whole name may be longer than the 64 letters that fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A certificate, and its key where we have it."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey | None

    @property
    def id(self) -> str:
        return self.certificate.fingerprint(hashes.SHA256()).hex()

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """Empty without a key."""
        if self.key is None:
            return b""
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @property
    def names(self) -> frozenset[str]:
        """That it is for."""
        try:
            extension = self.certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        except x509.ExtensionNotFound:
            return frozenset()
        return frozenset(extension.value.get_values_for_type(x509.DNSName))


def make_authority(now: datetime, lives: Lives) -> Pair:
    """A CA that signs leaves and no other CA."""
    key = ec.generate_private_key(ec.SECP256R1())
    serial_number = x509.random_serial_number()
    name = _name(f"{_COMMON_NAME} CA {serial_number:x}"[:64])
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        x509.CertificateBuilder()
        .serial_number(serial_number)
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .not_valid_before(now - lives.backdated)
        .not_valid_after(now + lives.authority)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Pair(certificate=certificate, key=key)


def make_leaf(authority: Pair, names: Collection[str], now: datetime, lives: Lives) -> Pair:
    """To serve with, by one of these names."""
    assert authority.key is not None, "a plan signs with a CA whose key is there"
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.certificate
    identifier = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    certificate = (
        x509.CertificateBuilder()
        .serial_number(x509.random_serial_number())
        .subject_name(_name(_COMMON_NAME))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .not_valid_before(max(now - lives.backdated, issuer.not_valid_before_utc))
        .not_valid_after(leaf_ends_at(now, issuer.not_valid_after_utc, lives))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in sorted(names)]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return Pair(certificate=certificate, key=key)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
