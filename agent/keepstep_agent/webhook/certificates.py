"""The webhook's certificates and the Secret that holds them: CAs with their keys, and the leaf that all replicas serve.

Owns the Secret's four entries: `tls.crt` and `tls.key` hold the leaf; `ca.crt` holds all CAs as published, the newest
first, and `ca.key` their keys. What cannot be read counts as missing and is made again. API servers (Go) look for a CA
by its name, so every CA has a name of its own.
"""

import base64
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from keepstep_agent.core.policies.certificate_rotation import NEW, CertificateLifetimes, Plan, Validity

_NAME: Final = "keepstep-webhook"  # a leaf's name has no use, and a Service's may exceed its 64 characters
_KEY: Final = re.compile(rb"-----BEGIN ([A-Z ]+)-----.+?-----END \1-----", re.DOTALL)
_USES: Final = (
    *("digital_signature", "key_cert_sign", "crl_sign", "content_commitment", "key_encipherment"),
    *("data_encipherment", "key_agreement", "encipher_only", "decipher_only"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateWithKey:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def id(self) -> str:
        return fingerprint(self.certificate)

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def term(self, authority: str) -> Validity:
        dates = self.certificate
        return Validity(authority=authority, begins_at=dates.not_valid_before_utc, ends_at=dates.not_valid_after_utc)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretContent:
    """What the Secret holds, the newest CA first. `issuer` is the id of the CA that signed the leaf."""

    authorities: tuple[CertificateWithKey, ...] = ()
    leaf: CertificateWithKey | None = None
    issuer: str = ""

    @property
    def bundle(self) -> bytes:
        """The CAs that API servers are to trust, in PEM."""
        return b"".join(one.certificate_pem for one in self.authorities)

    @property
    def terms(self) -> tuple[tuple[Validity, ...], Validity | None]:
        """The validity of the CAs, and of the leaf."""
        leaf = None if self.leaf is None else self.leaf.term(self.issuer)
        return tuple(one.term(one.id) for one in self.authorities), leaf

    def after(
        self, due: Plan, names: Collection[str], now: datetime, lifetimes: CertificateLifetimes
    ) -> "SecretContent":
        """Return the content after everything in `due` is done."""
        by_id = {one.id: one for one in self.authorities}
        authorities = tuple(by_id[one] for one in due.keep)
        if due.make_authority:
            by_id[NEW] = make_authority(now, lifetimes)
            authorities = (by_id[NEW], *authorities)
        if due.sign_with is None:
            return replace(self, authorities=authorities)
        signer = by_id[due.sign_with]
        return SecretContent(authorities=authorities, leaf=make_leaf(signer, names, now, lifetimes), issuer=signer.id)

    def data(self) -> dict[str, str]:
        """Return the Secret's `data`. There must be a leaf."""
        assert self.leaf is not None, "a plan leaves no Secret without"
        pairs = {"tls": (self.leaf,), "ca": self.authorities}
        crts = {f"{name}.crt": b"".join(one.certificate_pem for one in some) for name, some in pairs.items()}
        keys = {f"{name}.key": b"".join(one.key_pem for one in some) for name, some in pairs.items()}
        return {name: base64.b64encode(entry).decode() for name, entry in (crts | keys).items()}


def read_secret(secret: Mapping[str, Any], name: str, now: datetime) -> SecretContent:
    """Return what the Secret holds: the CAs, and a leaf if it is valid for `name` now."""
    data = secret.get("data") or {}
    authorities = _pairs(data, "ca", of_ca=True)
    for leaf in _pairs(data, "tls", of_ca=False) if authorities else ():
        policy = PolicyBuilder().store(Store([one.certificate for one in authorities])).time(now)
        try:
            chain = policy.build_server_verifier(x509.DNSName(name)).verify(leaf.certificate, [])
        except VerificationError:
            continue
        return SecretContent(authorities=authorities, leaf=leaf, issuer=fingerprint(chain[-1]))
    return SecretContent(authorities=authorities)


def read_bundle(text: str) -> list[x509.Certificate]:
    """Return the certificates of a `caBundle`; none if it cannot be read, because then nothing is trusted."""
    try:
        return x509.load_pem_x509_certificates(base64.b64decode(text))
    except ValueError:
        return []


def fingerprint(certificate: x509.Certificate) -> str:
    return certificate.fingerprint(hashes.SHA256()).hex()


def make_authority(now: datetime, lifetimes: CertificateLifetimes) -> CertificateWithKey:
    """Make a CA that signs leaves and no other CA."""
    name = f"{_NAME} CA {x509.random_serial_number():x}"[:64]
    return _make(name, None, now - lifetimes.backdated, now + lifetimes.authority)


def make_leaf(
    authority: CertificateWithKey, names: Collection[str], now: datetime, lifetimes: CertificateLifetimes
) -> CertificateWithKey:
    """Make a certificate to serve with under these names."""
    issuer = authority.certificate
    begins_at = max(now - lifetimes.backdated, issuer.not_valid_before_utc)
    served = x509.SubjectAlternativeName([x509.DNSName(name) for name in sorted(names)])
    uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    return _make(_NAME, authority, begins_at, lifetimes.leaf_ends_at(now, issuer.not_valid_after_utc), uses, served)


def _make(
    name: str,
    authority: CertificateWithKey | None,
    begins_at: datetime,
    ends_at: datetime,
    *extensions: x509.ExtensionType,
) -> CertificateWithKey:
    """Make a leaf, or a CA if `authority` is None."""
    key, is_ca = ec.generate_private_key(ec.SECP256R1()), authority is None
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer, signer = (subject, key) if authority is None else (authority.certificate.subject, authority.key)
    uses = dict.fromkeys(_USES, False) | dict.fromkeys(_USES[1:3] if is_ca else _USES[:1], True)
    public = key.public_key()
    builder = (
        x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number(), begins_at, ends_at)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
        .add_extension(x509.KeyUsage(**uses), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return CertificateWithKey(certificate=builder.sign(signer, hashes.SHA256()), key=key)


def _pairs(data: Mapping[str, Any], name: str, *, of_ca: bool) -> tuple[CertificateWithKey, ...]:
    """Parse the certificates and keys of two entries; none if anything about them is wrong."""
    found = []
    try:
        certificates = x509.load_pem_x509_certificates(base64.b64decode(data[f"{name}.crt"]))
        keys = [load_pem_private_key(one[0], None) for one in _KEY.finditer(base64.b64decode(data[f"{name}.key"]))]
        for certificate, key in zip(certificates, keys, strict=True):
            is_ca = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
            fits = is_ca is of_ca and key.public_key() == certificate.public_key()
            if not fits or not isinstance(key, ec.EllipticCurvePrivateKey):
                return ()
            found.append(CertificateWithKey(certificate=certificate, key=key))
    except (KeyError, TypeError, ValueError, UnsupportedAlgorithm, x509.ExtensionNotFound):
        return ()
    return tuple(found)
