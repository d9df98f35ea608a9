"""The certificates that we make, verified by OpenSSL at its strictest; which are due, over years of virtual time."""

import base64
import random
import shutil
import ssl
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from tests.harness.bounds import HANG_SECONDS
from tests.webhook.handshakes import serving, shake_hands

from keepstep_agent.webhook.certificates import (
    _USES,
    CertificateLifetimes,
    CertificateWithKey,
    SecretContent,
    bundle_of,
    make_certificate,
    read_bundle,
    read_secret,
    renewed,
)

NOW = datetime.now(UTC)
LIVES = CertificateLifetimes()
SERVICE = "keepstep-webhook.keepstep.svc"
NAMES = frozenset({SERVICE, f"{SERVICE}.cluster.local"})
DAY = timedelta(days=1)
MINUTE = timedelta(minutes=1)


def made(age: timedelta = timedelta()) -> CertificateWithKey:
    return make_certificate(NAMES, NOW - age, LIVES)


def pems(*some: CertificateWithKey) -> bytes:
    return b"".join(one.certificate_pem for one in some)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_certificate_is_verified_by_itself_for_each_of_its_names(tmp_path: Path, name: str) -> None:
    one = made()
    shake_hands(serving(tmp_path, one), one.certificate_pem, name)


def test_for_another_name_it_is_not(tmp_path: Path) -> None:
    one = made()
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        shake_hands(serving(tmp_path, one), one.certificate_pem, "keepstep-webhook.other.svc")


def test_a_bundle_of_several_verifies_each_and_no_other(tmp_path: Path) -> None:
    first, second, other = made(), made(), made()
    for bundle in (pems(first, second), pems(second, first)):
        for one in (first, second):
            shake_hands(serving(tmp_path, one), bundle, SERVICE)
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(serving(tmp_path, other), bundle, SERVICE)


def test_names_as_long_as_kubernetes_allows_fit(tmp_path: Path) -> None:
    name = f"{'s' * 63}.{'n' * 63}.svc"
    one = make_certificate({name}, NOW, LIVES)
    shake_hands(serving(tmp_path, one), one.certificate_pem, name)


def signed_by(signer: ec.EllipticCurvePrivateKey, *, is_authority: bool = False) -> bytes:
    """A certificate for the Service, or of the authority itself, with all that OpenSSL asks for."""
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "keepstep-webhook")])
    subject = issuer if is_authority else x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "another")])
    key = signer if is_authority else ec.generate_private_key(ec.SECP256R1())
    uses = dict.fromkeys(_USES, False) | {"key_cert_sign" if is_authority else "digital_signature": True}
    builder = (
        x509.CertificateBuilder(issuer, subject, key.public_key(), 7, NOW - DAY, NOW + DAY)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**uses), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if not is_authority:
        names = x509.SubjectAlternativeName([x509.DNSName(SERVICE)])
        builder = builder.add_extension(names, critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl on this machine")
def test_openssl_at_its_strictest_takes_it_and_nothing_that_its_key_signs(tmp_path: Path) -> None:
    one = made()
    (tmp_path / "tls.crt").write_bytes(one.certificate_pem)
    command = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-verify_hostname", SERVICE]
    command += ["-CAfile", str(tmp_path / "tls.crt")]

    def verify(path: Path) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([*command, path], capture_output=True, text=True, timeout=HANG_SECONDS)

    done = verify(tmp_path / "tls.crt")
    assert done.returncode == 0, done.stderr
    key = ec.generate_private_key(ec.SECP256R1())
    for signer in (key, one.key):
        (tmp_path / "signed.crt").write_bytes(signed_by(signer))
        (tmp_path / "tls.crt").write_bytes(signed_by(key, is_authority=True) if signer is key else one.certificate_pem)
        # The first says that this is how an authority's is taken.
        assert (verify(tmp_path / "signed.crt").returncode == 0) is (signer is key)


def test_what_is_written_to_the_secret_is_read_again() -> None:
    for written in (SecretContent(served=made()), SecretContent(served=made(), following=made())):
        data = written.data("")
        assert read_secret({"data": data}, NAMES, NOW).certificates == written.certificates


@pytest.mark.parametrize("entry", ["tls.crt", "tls.key"])
@pytest.mark.parametrize("text", [None, "", "%%%", "Z2FyYmFnZQ==", 7])
def test_a_secret_with_an_entry_that_is_none_is_made_whole_again(entry: str, text: object) -> None:
    data = {**SecretContent(served=made()).data(""), entry: text}
    found = read_secret({"data": data}, NAMES, NOW)
    assert found.served is None
    after = renewed(found, (), NAMES, NOW, LIVES)
    assert after.served is not None
    assert renewed(after, (), NAMES, NOW, LIVES) == after, "and nothing else is due"


@pytest.mark.parametrize(
    ("names", "now"),
    [
        (["keepstep-webhook.other.svc"], NOW),
        (NAMES, NOW + LIVES.life + MINUTE),
        (NAMES, NOW - timedelta(hours=2)),
    ],
    ids=["for another Service", "expired", "from the future"],
)
def test_what_api_servers_would_not_take_is_none(names: list[str], now: datetime) -> None:
    data = SecretContent(served=made()).data("")
    assert read_secret({"data": data}, NAMES, NOW).served is not None
    assert read_secret({"data": data}, names, now).served is None


def test_the_key_of_another_certificate_is_none() -> None:
    data = {**SecretContent(served=made()).data(""), "tls.key": SecretContent(served=made()).data("")["tls.key"]}
    assert read_secret({"data": data}, NAMES, NOW).served is None


def test_a_young_one_is_left_alone() -> None:
    kept = SecretContent(served=made(200 * DAY))
    assert renewed(kept, (), NAMES, NOW, LIVES) == kept


def test_beside_one_past_two_thirds_of_its_life_comes_the_next_which_is_not_served_yet() -> None:
    kept = SecretContent(served=made(244 * DAY))
    after = renewed(kept, kept.certificates, NAMES, NOW, LIVES)
    assert after.served == kept.served
    assert after.following is not None


@pytest.mark.parametrize(("age", "is_served"), [(9 * MINUTE, False), (11 * MINUTE, True), (30 * DAY, True)])
def test_the_next_is_served_once_it_has_been_published_for_a_while(age: timedelta, is_served: bool) -> None:
    kept = SecretContent(served=made(244 * DAY), following=made(age))
    after = renewed(kept, kept.certificates, NAMES, NOW, LIVES)
    assert after == (SecretContent(served=kept.following) if is_served else kept)


def test_a_next_one_that_is_published_no_more_is_made_anew() -> None:
    """Its age would say that API servers know it, and they heard of it a moment ago."""
    kept = SecretContent(served=made(244 * DAY), following=made(30 * DAY))
    after = renewed(kept, kept.certificates[:1], NAMES, NOW, LIVES)
    assert after.served == kept.served
    assert after.following not in (None, kept.following)


def test_where_nothing_valid_is_served_the_next_is_at_once() -> None:
    kept = SecretContent(following=made())
    assert renewed(kept, (), NAMES, NOW, LIVES) == SecretContent(served=kept.following)


def test_what_was_published_stays_until_it_expires_and_no_more_than_four_of_it() -> None:
    kept = SecretContent(served=made(), following=made())
    former = [made(days * DAY).certificate for days in (10, 300, 20, 200, 100, 400)]
    found = read_bundle(bundle_of(kept, [*former, *kept.certificates], NOW))
    assert found == [*kept.certificates, former[0], former[2], former[4], former[3]]
    assert read_bundle(bundle_of(SecretContent(served=made()), former[5:], NOW))[1:] == []


@pytest.mark.parametrize("text", ["", "%%%", base64.b64encode(b"garbage").decode()])
def test_a_bundle_that_cannot_be_read_is_empty(text: str) -> None:
    assert read_bundle(text) == []


@pytest.mark.parametrize("seed", range(20))
def test_over_years_whoever_lags_or_is_lost_no_api_server_sees_what_it_does_not_trust(seed: int) -> None:
    """Looks at any hour, API servers that hear late, replicas that load late, Secrets and bundles that are lost."""
    chance = random.Random(seed)
    now = NOW
    data: dict[str, str | None] = {}
    bundles = [(now, "")]
    """What has been published since when."""
    served: list[x509.Certificate] = []
    made_by_necessity: set[x509.Certificate] = set()
    generations = set()
    for _ in range(400):
        published = read_bundle(bundles[-1][1])
        kept = read_secret({"data": data}, NAMES, now)
        after = renewed(kept, published, NAMES, now, LIVES)
        bundle = bundle_of(after, published, now)
        if bundle != bundles[-1][1]:
            bundles.append((now, bundle))
        assert len(read_bundle(bundle)) <= 6
        if chance.random() < 0.05:
            now += timedelta(seconds=20)
            continue  # it ended before it wrote the Secret
        data = after.data(bundle)
        assert after.served is not None
        if kept.served is None and kept.following is None:
            made_by_necessity.add(after.served.certificate)
        generations.add(after.served.certificate)
        # A replica loads it now or an hour later, and one may be cut off for a month.
        if not served or served[-1] != after.served.certificate:
            served.append(after.served.certificate)
        known = [text for at, text in bundles if at <= now - timedelta(minutes=2)][-1:]
        for one in served[-2:]:
            if known and one not in made_by_necessity and now < one.not_valid_after_utc:
                assert one in read_bundle(known[0]), "an API server that hears two minutes late trusts it"
        now += chance.choice([timedelta(seconds=5), timedelta(minutes=4), timedelta(hours=1), 6 * DAY, 20 * DAY])
        match chance.random():
            case luck if luck < 0.01:
                data = {}
            case luck if luck < 0.02:
                bundles.append((now, ""))
                made_by_necessity.update(served)
            case _:
                pass
        bundles = bundles[-50:]
    assert len(generations) > 3, "it was renewed"
