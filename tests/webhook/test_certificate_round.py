"""Replicas whose every call to the API server may be overtaken, fail, or be lost: what is served stays verified.

The rounds are the real ones, with real certificates; only the cluster, the clocks and the order of steps are ours.
"""

import base64
import random
from collections.abc import Coroutine, Generator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from structlog.testing import capture_logs
from tests.fakes.object_shelf import ObjectShelf, RefusedError

from keepstep_agent.adapters.kubernetes import ApiServer
from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_agent.core.policies.certificate_rotation import CertificateLifetimes
from keepstep_agent.webhook.certificate_keeper import CertificateKeeper, ServingCertificate, ca_bundles, published_in
from keepstep_agent.webhook.certificates import SecretContent, fingerprint, read_bundle, read_secret
from keepstep_agent.webhook.settings import SelfManaged

MANAGED = SelfManaged(namespace="keepstep", service="keepstep-webhook", secret="s", configuration="c")
SERVICE = "keepstep-webhook.keepstep.svc"
SECRETS, CONFIGURATIONS = "secrets", "mutatingwebhookconfigurations"
LIVES = CertificateLifetimes()
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)


class _Pause:
    """Awaiting it gives the other replica a turn; what is sent back is what becomes of the call."""

    def __await__(self) -> Generator[None, str, str]:
        return (yield)


class _SteppedCluster(ApiServer):
    """Each call pauses before it takes effect and after it."""

    def __init__(self, shelf: ObjectShelf) -> None:
        self._shelf = shelf

    async def call(
        self, method: str, path: str, content: Mapping[str, Any] | None = None, content_type: str = ""
    ) -> dict[str, Any]:
        resource, name = path.partition("?")[0].split("/")[-2:]
        away = KeepstepError(ErrorKind.UNREACHABLE, f"{method} {path}: away")
        if await _Pause() == "lost":
            raise away
        try:
            answer = self._shelf.get(resource, name) if content is None else self._shelf.patch(resource, name, content)
        except RefusedError as error:
            kinds = {404: ErrorKind.NOT_FOUND, 409: ErrorKind.ALREADY_EXISTS}
            raise KeepstepError(kinds[error.status], str(error)) from error
        if await _Pause() == "lost":
            raise away
        return answer


class _Served(ServingCertificate):
    """Keeps the pair that it was given last."""

    def __init__(self) -> None:
        self.pair = b""

    def put(self, pair: bytes) -> None:
        self.pair = pair


def verify(leaf: x509.Certificate, bundle: bytes, now: datetime) -> None:
    """As an API server does it. AssertionError where it would not take the leaf."""
    authorities = x509.load_pem_x509_certificates(bundle) if bundle else []
    assert authorities, "nobody is trusted"
    policy = PolicyBuilder().store(Store(authorities)).time(now.replace(tzinfo=None))
    try:
        policy.build_server_verifier(x509.DNSName(SERVICE)).verify(leaf, [])
    except VerificationError as error:
        raise AssertionError(f"at {now} a leaf is not verified by {len(authorities)} CAs") from error


class _World:
    """A cluster, its time, and API servers that trust what was published in the last `settle`."""

    def __init__(self) -> None:
        self.shelf = ObjectShelf()
        self.shelf.create(SECRETS, {"metadata": {"name": MANAGED.secret}})
        self.shelf.create(CONFIGURATIONS, configuration("pods.keepstep.dev", "others.keepstep.dev"))
        self.now = BEGIN
        self.trusted: list[tuple[datetime, bytes]] = [(BEGIN, b"")]
        self.leaves: dict[str, str] = {}
        """The CA of each, by id."""
        self.not_yet_trusted: set[str] = set()
        """CAs that signed when nothing valid was served: that they are trusted only now is no loss."""
        self._ends_at = BEGIN
        self._noted = 0
        self._verified: set[tuple[bytes, bytes]] = set()

    def note(self) -> None:
        """What the last step changed."""
        if self._noted != self.shelf.version:
            self._noted = self.shelf.version
            self._note_change()
        while len(self.trusted) > 1 and self.trusted[1][0] <= self.now - LIVES.settle:
            del self.trusted[0]
        for one in tuple(self.not_yet_trusted):
            if all(one in ids(bundle) for _, bundle in self.trusted):
                self.not_yet_trusted.remove(one)

    def _note_change(self) -> None:
        try:
            bundle = self._published()
        except RefusedError:
            return
        if bundle != self.trusted[-1][1]:
            self.trusted.append((self.now, bundle))
        kept = self.kept()
        if kept.leaf is not None and kept.leaf.id not in self.leaves:
            self.leaves[kept.leaf.id] = kept.issuer
            if self._ends_at <= self.now:
                self.not_yet_trusted.add(kept.issuer)
            self._ends_at = kept.leaf.certificate.not_valid_after_utc

    def check(self, pair: bytes) -> None:
        """Somebody serves it now: every API server must take it."""
        leaf = x509.load_pem_x509_certificate(pair)
        if self.leaves[fingerprint(leaf)] not in self.not_yet_trusted and self.now < leaf.not_valid_after_utc:
            for _, bundle in self.trusted:
                # Once: until it expires, its CA does not.
                if (pair, bundle) not in self._verified:
                    verify(leaf, bundle, self.now)
                    self._verified.add((pair, bundle))

    def kept(self) -> SecretContent:
        return read_secret(self.shelf.get(SECRETS, MANAGED.secret), SERVICE, self.now)

    def _published(self) -> bytes:
        """What all webhooks trust."""
        first, second = ca_bundles(self.shelf.get(CONFIGURATIONS, "c")).values()
        assert first == second
        return base64.b64decode(first)


def configuration(*webhooks: str) -> dict[str, Any]:
    """As the chart installs it."""
    service = {"name": "keepstep-webhook", "namespace": "keepstep"}
    return {
        "metadata": {"name": "c"},
        "webhooks": [{"name": name, "rules": [], "clientConfig": {"service": service}} for name in webhooks],
    }


def ids(bundle: bytes) -> set[str]:
    return {fingerprint(one) for one in read_bundle(base64.b64encode(bundle).decode())}


class _Replica:
    """A webhook. It serves what it found last, as soon as it has loaded that."""

    def __init__(self, world: _World) -> None:
        self._world = world
        self._look: Coroutine[None, str | None, None] | None = None
        self._served = _Served()
        self.serves = b""
        self.start()

    def start(self) -> None:
        """Again, perhaps in the middle of a look; the files are still there."""
        if self._look is not None:
            self._look.close()
            self._look = None
        self._keeper = CertificateKeeper(
            _SteppedCluster(self._world.shelf), MANAGED, self._served, lambda: self._world.now
        )

    def step(self, outcome: str = "fine") -> bool:
        """To the next pause, or to the end of the look, where it is true."""
        try:
            if self._look is None:
                self._look = self._keeper.look()
                self._look.send(None)
            else:
                self._look.send(outcome)
        except (StopIteration, KeepstepError) as end:
            self._look = None
            self.problem = end if isinstance(end, KeepstepError) else None
            return True
        finally:
            self._world.note()
        return False

    def look(self) -> KeepstepError | None:
        """A whole one, without anybody in between; what was wrong."""
        while not self.step():
            continue
        return self.problem

    def load(self) -> None:
        self.serves = self._served.pair


@pytest.mark.parametrize("seed", range(40))
def test_whatever_overtakes_fails_or_ends_no_api_server_sees_a_leaf_that_it_does_not_trust(seed: int) -> None:
    """From the first day, and from the day on which the CA is due."""
    chance = random.Random(seed)
    world = _World()
    replicas = [_Replica(world), _Replica(world)]
    if seed % 4:
        for age in (0, 60, 120, 180, 243):
            world.now = BEGIN + age * DAY
            replicas[0].look()
            world.note()
    trouble = chance.choice([0.0, 0.02, 0.2])
    for _ in range(60):
        # One stands still while the other goes on, for a call or for several looks.
        replica = chance.choice(replicas)
        for _ in range(chance.choice([1, 3, 10, 40])):
            replica.step("lost" if chance.random() < trouble else "fine")
            match chance.random():
                case luck if luck < 0.01:
                    replica.start()
                case luck if luck < 0.1:
                    replica.load()
                case luck if luck < 0.3:
                    world.now += chance.choice([timedelta(seconds=10), timedelta(minutes=4), timedelta(minutes=11)])
                case luck if luck < 0.302:
                    world.now += chance.randint(1, 12) * DAY
            world.note()
            for one in replicas:
                if one.serves:
                    world.check(one.serves)
    assert len(set(world.leaves.values())) > (1 if seed % 4 else 0), "it did rotate"


def test_two_replicas_that_look_every_five_days_for_years_never_serve_an_expired_leaf() -> None:
    world = _World()
    replicas = [_Replica(world), _Replica(world)]
    most = 0
    for day in range(0, 3 * 365, 5):
        for replica in replicas:
            assert replica.look() is None
            replica.load()
            world.now += timedelta(minutes=11)
        for replica in replicas:
            leaf = x509.load_pem_x509_certificate(replica.serves)
            assert leaf.not_valid_after_utc - world.now > 20 * DAY
            world.check(replica.serves)
        most = max(most, len(world.kept().authorities))
        world.now = BEGIN + (day + 5) * DAY
    assert len(set(world.leaves.values())) == 5, "a CA every eight months"
    assert len(world.leaves) < 30, "a leaf every two months"
    assert most == 2


def test_of_two_that_begin_at_once_one_writes_and_the_other_serves_the_same() -> None:
    world = _World()
    replicas = [_Replica(world), _Replica(world)]
    looking = list(replicas)
    with capture_logs() as lines:
        while looking:
            looking = [replica for replica in looking if not replica.step()]
    assert [line["event"] for line in lines] == ["certificates.renewed", "authorities.published"]
    problems = [replica.problem for replica in replicas if replica.problem is not None]
    assert [one.kind for one in problems] == [ErrorKind.ALREADY_EXISTS]
    for replica in replicas:
        assert replica.look() is None
        replica.load()
    assert replicas[0].serves == replicas[1].serves != b""


def test_any_replica_puts_back_a_bundle_that_somebody_took_away() -> None:
    world = _World()
    replicas = [_Replica(world), _Replica(world)]
    for replica in replicas:
        assert replica.look() is None
        before = published_in(world.shelf.get(CONFIGURATIONS, "c"))
        wipe(world)
        assert not published_in(world.shelf.get(CONFIGURATIONS, "c"))
        assert replica.look() is None
        assert published_in(world.shelf.get(CONFIGURATIONS, "c")) == before != frozenset()


def wipe(world: _World) -> None:
    """As somebody does who applies a manifest without caBundle."""
    webhooks = world.shelf.get(CONFIGURATIONS, "c")["webhooks"]
    wiped = [{"name": one["name"], "clientConfig": {"caBundle": None}} for one in webhooks]
    world.shelf.patch(CONFIGURATIONS, "c", {"webhooks": wiped})


def test_what_others_wrote_into_our_objects_stays() -> None:
    world = _World()
    replica = _Replica(world)
    replica.look()
    world.shelf.patch(SECRETS, "s", {"metadata": {"labels": {"team": "ours"}}, "data": {"note": "aGVsbG8="}})
    world.now += 70 * DAY
    before = world.kept().leaf
    assert replica.look() is None
    leaf = world.kept().leaf
    assert leaf is not None
    assert before is not None
    assert leaf.id != before.id
    secret = world.shelf.get(SECRETS, "s")
    assert secret["metadata"]["labels"] == {"team": "ours"}
    assert secret["data"]["note"] == "aGVsbG8="
    webhooks = world.shelf.get(CONFIGURATIONS, "c")["webhooks"]
    assert all(one["clientConfig"]["service"]["name"] == "keepstep-webhook" for one in webhooks)


def test_a_secret_that_is_emptied_has_everything_renewed_at_once() -> None:
    """The way to end a CA whose key is known to somebody."""
    world = _World()
    replica = _Replica(world)
    replica.look()
    before = ids(world.trusted[-1][1])
    world.shelf.patch(SECRETS, "s", {"data": None})
    assert replica.look() is None
    assert not before & {one.id for one in world.kept().authorities}
    replica.load()
    verify(x509.load_pem_x509_certificate(replica.serves), world.trusted[-1][1], world.now)


def test_without_the_configuration_the_leaf_is_made_and_what_is_missing_is_said() -> None:
    world = _World()
    world.shelf.delete(CONFIGURATIONS, "c")
    replica = _Replica(world)
    problem = replica.look()
    assert problem is not None
    assert problem.kind is ErrorKind.NOT_FOUND
    assert world.kept().leaf is not None
    replica.load()
    assert replica.serves
    world.shelf.create(CONFIGURATIONS, configuration("pods.keepstep.dev", "others.keepstep.dev"))
    assert replica.look() is None
