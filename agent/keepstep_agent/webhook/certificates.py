"""The webhook's certificates: which are due, and the Secret that holds them.

A certificate is signed by its own key, and API servers trust it by itself: there is no CA, whose key could sign others.
Owns the rules of renewal. They ensure that every API server trusts what any replica serves:

- The next certificate is made at two thirds of the life of the one that is served. It is published beside it first, and
  served once it has been published for `settle`, because API servers learn of it at different times.
- What was served before stays published until it expires, for a replica that has not seen the new one.
- If nothing valid is served, there is nothing to lose, and what is made is served at once.

Owns the Secret's entries too: `tls.crt` and `tls.key` are served, `next.crt` and `next.key` will be, and `ca.crt` is
what is published. What cannot be read counts as missing and is made again.
"""

import base64
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_NAME: Final = "keepstep-webhook"  # nothing reads it; a Service's name may be longer than the 64 characters it may have
_MOST_FORMER: Final = 4
"""How many that are not in the Secret stay published: one is served by a replica that lags, and the others may be newer
ones, of runs that ended before they wrote the Secret."""
_USES: Final = (
    *("digital_signature", "key_cert_sign", "crl_sign", "content_commitment", "key_encipherment"),
    *("data_encipherment", "key_agreement", "encipher_only", "decipher_only"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateLifetimes:
    """`life` of a certificate. `settle`: how long it is published before it is served. `backdated`: how much clocks may
    differ."""

    life: timedelta = timedelta(days=365)
    settle: timedelta = timedelta(minutes=10)
    backdated: timedelta = timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateWithKey:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(compare=False)

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def is_old(self, now: datetime) -> bool:
        begins_at, ends_at = self.certificate.not_valid_before_utc, self.certificate.not_valid_after_utc
        return now - begins_at >= (ends_at - begins_at) * 2 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretContent:
    """What the Secret holds, as far as it is valid."""

    served: CertificateWithKey | None = None
    following: CertificateWithKey | None = None
    """Published already, and served next."""

    @property
    def certificates(self) -> list[x509.Certificate]:
        return [one.certificate for one in (self.served, self.following) if one is not None]

    def data(self, bundle: str) -> dict[str, str | None]:
        """Return a patch of the Secret's `data`. `bundle` as for `bundle_of`."""
        data: dict[str, str | None] = {"ca.crt": bundle}
        for name, one in (("tls", self.served), ("next", self.following)):
            data[f"{name}.crt"] = None if one is None else base64.b64encode(one.certificate_pem).decode()
            data[f"{name}.key"] = None if one is None else base64.b64encode(one.key_pem).decode()
        return data


def renewed(
    kept: SecretContent,
    published: Collection[x509.Certificate],
    names: Collection[str],
    now: datetime,
    lifetimes: CertificateLifetimes,
) -> SecretContent:
    """Return what the Secret shall hold. `published`: what API servers trust now, before anything is done."""
    if kept.served is None:
        return SecretContent(served=kept.following or make_certificate(names, now, lifetimes))
    if not kept.served.is_old(now):
        return SecretContent(served=kept.served)
    if kept.following is None or kept.following.certificate not in published:
        # Somebody has taken away what was published. A new one counts from when it is published.
        return SecretContent(served=kept.served, following=make_certificate(names, now, lifetimes))
    made_at = kept.following.certificate.not_valid_before_utc + lifetimes.backdated
    return SecretContent(served=kept.following) if now - made_at >= lifetimes.settle else kept


def bundle_of(kept: SecretContent, published: Iterable[x509.Certificate], now: datetime) -> str:
    """Return the `caBundle` to publish, in base64: what the Secret holds, and of what was published the newest."""
    ours = kept.certificates
    former = [one for one in dict.fromkeys(published) if one not in ours and now < one.not_valid_after_utc]
    former.sort(key=lambda one: one.not_valid_before_utc, reverse=True)
    pems = [one.public_bytes(Encoding.PEM) for one in (*ours, *former[:_MOST_FORMER])]
    return base64.b64encode(b"".join(pems)).decode()


def read_bundle(text: str) -> list[x509.Certificate]:
    """Return the certificates of a `caBundle`; none if it cannot be read, because then nothing is trusted."""
    try:
        return x509.load_pem_x509_certificates(base64.b64decode(text))
    except ValueError:
        return []


def read_secret(secret: Mapping[str, Any], names: Collection[str], now: datetime) -> SecretContent:
    """Return what the Secret holds that is valid for these names now."""
    data = secret.get("data") or {}
    return SecretContent(served=_read(data, "tls", names, now), following=_read(data, "next", names, now))


def make_certificate(names: Collection[str], now: datetime, lifetimes: CertificateLifetimes) -> CertificateWithKey:
    """Make a certificate to serve with under these names."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)])
    begins_at, ends_at = now - lifetimes.backdated, now + lifetimes.life
    uses = dict.fromkeys(_USES, False) | {"digital_signature": True}
    public = key.public_key()
    builder = (
        x509.CertificateBuilder(subject, subject, public, x509.random_serial_number(), begins_at, ends_at)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**uses), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in sorted(names)]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
    )
    return CertificateWithKey(certificate=builder.sign(key, hashes.SHA256()), key=key)


def _read(data: Mapping[str, Any], name: str, names: Collection[str], now: datetime) -> CertificateWithKey | None:
    try:
        certificate = x509.load_pem_x509_certificate(base64.b64decode(data[f"{name}.crt"]))
        key = load_pem_private_key(base64.b64decode(data[f"{name}.key"]), None)
        served = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (KeyError, TypeError, ValueError, UnsupportedAlgorithm, x509.ExtensionNotFound):
        return None
    is_valid = certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc
    if not is_valid or not set(names) <= set(served.get_values_for_type(x509.DNSName)):
        return None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        return None
    return CertificateWithKey(certificate=certificate, key=key)
