"""What the Secret holds: the CAs with their keys, and the pair that every replica serves with.

Owns its four entries. `tls.crt` and `tls.key` are the leaf's, named as in every such Secret, so that what watches the
dates of certificates understands this one; `ca.crt` is all CAs, the newest first, as published; `ca.key` their keys.
What cannot be read counts as not there: everything can be made again.
"""

import base64
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from mooring_agent.core.certificate_plan import NEW, Authority, Held, Leaf, Lives, Plan
from mooring_agent.webhook.authority import Pair, make_authority, make_leaf

_LEAF, _LEAF_KEY = "tls.crt", "tls.key"
_AUTHORITIES, _AUTHORITY_KEYS = "ca.crt", "ca.key"
_PEM: Final = re.compile(rb"-----BEGIN ([A-Z ]+)-----.+?-----END \1-----", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """All that is kept in the Secret. A leaf without its key is none."""

    authorities: tuple[Pair, ...] = ()
    leaf: Pair | None = None

    @property
    def bundle(self) -> bytes:
        """What API servers shall trust."""
        return b"".join(one.certificate_pem for one in self.authorities)

    @property
    def held(self) -> Held:
        """As the plan looks at it."""
        leaf = self.leaf
        return Held(
            authorities=tuple(
                Authority(
                    id=one.id,
                    begins_at=one.certificate.not_valid_before_utc,
                    ends_at=one.certificate.not_valid_after_utc,
                    signs=one.key is not None,
                )
                for one in self.authorities
            ),
            leaf=None
            if leaf is None
            else Leaf(
                authority=next((one.id for one in self.authorities if _signed(one, leaf)), ""),
                begins_at=leaf.certificate.not_valid_before_utc,
                ends_at=leaf.certificate.not_valid_after_utc,
                names=leaf.names,
            ),
        )

    def after(self, plan: Plan, names: Collection[str], now: datetime, lives: Lives) -> "Kept":
        """With what is due made."""
        by_id = {one.id: one for one in self.authorities}
        authorities = [by_id[one] for one in plan.keep]
        if plan.make_authority:
            by_id[NEW] = make_authority(now, lives)
            authorities.insert(0, by_id[NEW])
        leaf = self.leaf if plan.sign_with is None else make_leaf(by_id[plan.sign_with], names, now, lives)
        return Kept(authorities=tuple(authorities), leaf=leaf)

    def data(self) -> dict[str, str]:
        """For the Secret's `data`."""
        assert self.leaf is not None, "a plan leaves no Secret without"
        entries = {
            _LEAF: self.leaf.certificate_pem,
            _LEAF_KEY: self.leaf.key_pem,
            _AUTHORITIES: self.bundle,
            _AUTHORITY_KEYS: b"".join(one.key_pem for one in self.authorities),
        }
        return {name: base64.b64encode(entry).decode() for name, entry in entries.items()}


def read_secret(secret: Mapping[str, Any]) -> Kept:
    """What there is, and can be used."""
    data = secret.get("data") or {}
    authority_keys = _keys(_decoded(data.get(_AUTHORITY_KEYS)))
    leaf_keys = _keys(_decoded(data.get(_LEAF_KEY)))
    authorities = [_with_key(one, authority_keys) for one in read_bundle(_decoded(data.get(_AUTHORITIES)))]
    leaves = [_with_key(one, leaf_keys) for one in read_bundle(_decoded(data.get(_LEAF)))]
    return Kept(
        authorities=tuple(one for one in authorities if _may_sign(one.certificate)),
        leaf=next((one for one in leaves if one.key is not None), None),
    )


def read_bundle(pem: bytes) -> list[x509.Certificate]:
    """The certificates in it that are any."""
    found = []
    for match in _PEM.finditer(pem):
        try:
            found.append(x509.load_pem_x509_certificate(match[0]))
        except ValueError:
            continue
    return found


def published_in(configuration: Mapping[str, Any]) -> frozenset[str]:
    """The CAs that all webhooks of a MutatingWebhookConfiguration trust, by id."""
    bundles = [
        frozenset(one.fingerprint(hashes.SHA256()).hex() for one in read_bundle(_decoded(text)))
        for text in ca_bundles(configuration).values()
    ]
    return frozenset.intersection(*bundles) if bundles else frozenset()


def ca_bundles(configuration: Mapping[str, Any]) -> dict[str, str]:
    """`caBundle` by the webhook's name, as it is written there."""
    return {
        webhook["name"]: (webhook.get("clientConfig") or {}).get("caBundle") or ""
        for webhook in configuration.get("webhooks") or []
    }


def _decoded(text: object) -> bytes:
    try:
        return base64.b64decode(text) if isinstance(text, str) else b""
    except ValueError:
        return b""


def _keys(pem: bytes) -> list[ec.EllipticCurvePrivateKey]:
    found = []
    for match in _PEM.finditer(pem):
        try:
            key = load_pem_private_key(match[0], password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            continue
        if isinstance(key, ec.EllipticCurvePrivateKey):
            found.append(key)
    return found


def _with_key(certificate: x509.Certificate, keys: list[ec.EllipticCurvePrivateKey]) -> Pair:
    return Pair(
        certificate=certificate,
        key=next((key for key in keys if key.public_key() == certificate.public_key()), None),
    )


def _may_sign(certificate: x509.Certificate) -> bool:
    """As one of ours may."""
    try:
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    except (x509.ExtensionNotFound, ValueError):
        return False
    return constraints.ca


def _signed(authority: Pair, leaf: Pair) -> bool:
    try:
        leaf.certificate.verify_directly_issued_by(authority.certificate)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
