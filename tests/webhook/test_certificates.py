"""The certificates that we make, verified by OpenSSL: in real handshakes, and by its command line at its strictest."""

import shutil
import ssl
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.core.policies.certificate_rotation import CertificateLifetimes, Plan, plan
from keepstep_agent.webhook.certificate_keeper import ServingCertificate
from keepstep_agent.webhook.certificates import (
    CertificateWithKey,
    SecretContent,
    make_authority,
    make_leaf,
    read_secret,
)

NOW = datetime.now(UTC)
LIVES = CertificateLifetimes()
SERVICE = "keepstep-webhook.keepstep.svc"
NAMES = frozenset({SERVICE, f"{SERVICE}.cluster.local"})


def pem(leaf: CertificateWithKey) -> bytes:
    return leaf.certificate_pem + leaf.key_pem


def due(kept: SecretContent) -> Plan:
    return plan(NOW, *kept.terms, {}, LIVES)


def shake_hands(folder: Path, leaf: CertificateWithKey, bundle: bytes, name: str) -> None:
    """Both sides in memory, the client as strict as it can be."""
    certificate = ServingCertificate(folder)
    certificate.put(pem(leaf))
    serving = certificate.context
    trusting = ssl.create_default_context(cadata=bundle.decode())
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(back, there, server_hostname=name)
    server = serving.wrap_bio(there, back, server_side=True)
    for _ in range(3):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert client.version() == "TLSv1.3"


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_leaf_is_verified_by_its_authority_for_each_of_its_names(tmp_path: Path, name: str) -> None:
    authority = make_authority(NOW, LIVES)
    shake_hands(tmp_path, make_leaf(authority, NAMES, NOW, LIVES), authority.certificate_pem, name)


def test_for_another_name_it_is_not(tmp_path: Path) -> None:
    authority = make_authority(NOW, LIVES)
    leaf = make_leaf(authority, NAMES, NOW, LIVES)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        shake_hands(tmp_path, leaf, authority.certificate_pem, "keepstep-webhook.other.svc")


@pytest.mark.parametrize("newest_first", [True, False])
def test_a_bundle_of_two_verifies_leaves_of_both(tmp_path: Path, newest_first: bool) -> None:
    authorities = [make_authority(NOW, LIVES) for _ in range(2)]
    assert authorities[0].certificate.subject != authorities[1].certificate.subject, "OpenSSL finds a CA by its name"
    pems = [one.certificate_pem for one in authorities]
    bundle = b"".join(reversed(pems) if newest_first else pems)
    for authority in authorities:
        shake_hands(tmp_path, make_leaf(authority, NAMES, NOW, LIVES), bundle, SERVICE)


def test_an_authority_does_not_verify_anothers_leaf(tmp_path: Path) -> None:
    authority, other = make_authority(NOW, LIVES), make_authority(NOW, LIVES)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(tmp_path, make_leaf(authority, NAMES, NOW, LIVES), other.certificate_pem, SERVICE)


def test_names_as_long_as_kubernetes_allows_fit(tmp_path: Path) -> None:
    name = f"{'s' * 63}.{'n' * 63}.svc"
    authority = make_authority(NOW, LIVES)
    shake_hands(tmp_path, make_leaf(authority, {name}, NOW, LIVES), authority.certificate_pem, name)


def test_a_leaf_ends_with_its_authority_and_begins_no_earlier() -> None:
    authority = make_authority(NOW - timedelta(days=360), LIVES)
    leaf = make_leaf(authority, NAMES, NOW, LIVES)
    assert leaf.certificate.not_valid_after_utc == authority.certificate.not_valid_after_utc
    young = make_authority(NOW, LIVES)
    leaf = make_leaf(young, NAMES, NOW, LIVES)
    assert leaf.certificate.not_valid_before_utc == young.certificate.not_valid_before_utc
    assert leaf.certificate.not_valid_before_utc <= NOW - timedelta(minutes=59), "clocks may differ"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl on this machine")
def test_openssl_at_its_strictest_takes_them(tmp_path: Path) -> None:
    authority = make_authority(NOW, LIVES)
    leaf = make_leaf(authority, NAMES, NOW, LIVES)
    (tmp_path / "ca.crt").write_bytes(authority.certificate_pem)
    (tmp_path / "tls.crt").write_bytes(leaf.certificate_pem)
    command = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-verify_hostname", SERVICE]
    done = subprocess.run(
        [*command, "-CAfile", tmp_path / "ca.crt", tmp_path / "tls.crt"],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    command = ["openssl", "verify", "-x509_strict", "-CAfile", str(tmp_path / "ca.crt")]
    sub_authority = make_leaf(CertificateWithKey(certificate=leaf.certificate, key=leaf.key), NAMES, NOW, LIVES)
    (tmp_path / "sub.crt").write_bytes(sub_authority.certificate_pem)
    done = subprocess.run(
        [*command, "-untrusted", tmp_path / "tls.crt", tmp_path / "sub.crt"],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode != 0, "a leaf must sign nothing"


def kept() -> SecretContent:
    first = SecretContent().after(due(SecretContent()), NAMES, NOW, LIVES)
    old = make_authority(NOW - timedelta(days=200), LIVES)
    return SecretContent(authorities=(*first.authorities, old), leaf=first.leaf, issuer=first.issuer)


def test_what_is_written_to_the_secret_is_read_again() -> None:
    written = kept()
    found = read_secret({"data": written.data()}, SERVICE, NOW)
    assert found.terms == written.terms
    assert found.data() == written.data()


@pytest.mark.parametrize("entry", ["tls.crt", "tls.key", "ca.crt", "ca.key"])
@pytest.mark.parametrize("text", [None, "", "%%%", "Z2FyYmFnZQ==", 7])
def test_a_secret_with_an_entry_that_is_none_is_made_whole_again(entry: str, text: object) -> None:
    data: dict[str, object] = {**kept().data(), entry: text}
    if text is None:
        del data[entry]
    found = read_secret({"data": data}, SERVICE, NOW)
    made = found.after(due(found), NAMES, NOW, LIVES)
    whole = read_secret({"data": made.data()}, SERVICE, NOW)
    assert whole.leaf is not None
    assert whole.after(due(whole), NAMES, NOW, LIVES) == whole, "and nothing else is due"


def test_a_certificate_that_is_no_authority_is_not_taken_for_one() -> None:
    data = kept().data()
    found = read_secret({"data": {**data, "ca.crt": data["tls.crt"], "ca.key": data["tls.key"]}}, SERVICE, NOW)
    assert found == SecretContent()


@pytest.mark.parametrize(
    ("name", "now"),
    [
        ("keepstep-webhook.other.svc", NOW),
        (SERVICE, NOW + LIVES.leaf + timedelta(minutes=1)),
        (SERVICE, NOW - timedelta(hours=2)),
    ],
    ids=["for another Service", "expired", "from the future"],
)
def test_a_leaf_that_api_servers_would_not_take_is_none(name: str, now: datetime) -> None:
    assert read_secret({"data": kept().data()}, SERVICE, NOW).leaf is not None
    assert read_secret({"data": kept().data()}, name, now).leaf is None


def test_a_leaf_of_an_authority_that_is_not_kept_is_none() -> None:
    data, other = kept().data(), kept().data()
    theirs = {name: other[name] for name in ("tls.crt", "tls.key")}
    found = read_secret({"data": {**data, **theirs}}, SERVICE, NOW)
    assert found.leaf is None
    assert len(found.authorities) == 2


def test_a_pair_that_is_put_serves_is_its_owners_alone_and_outlives_the_process(tmp_path: Path) -> None:
    folder = tmp_path / "certificates"
    authority = make_authority(NOW, LIVES)
    for days in range(3):
        leaf = make_leaf(authority, NAMES, NOW + timedelta(days=days), LIVES)
        certificate = ServingCertificate(folder)
        assert certificate.seconds_left() < 0
        certificate.put(pem(leaf))
        assert certificate.expires_at == leaf.certificate.not_valid_after_utc
        (file,) = folder.iterdir()
        assert file.stat().st_mode & 0o777 == 0o600
        again = ServingCertificate(folder)
        again.load()
        assert again.expires_at == certificate.expires_at
