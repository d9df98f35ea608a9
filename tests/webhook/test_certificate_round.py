"""Replicas whose every call to the API server may be overtaken, fail, or be lost: what is served stays verified.

The rounds are the real ones, with real certificates; only the cluster, the clocks and the order of steps are ours.
"""

import base64
import random
from collections.abc import Coroutine, Generator
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from structlog.testing import capture_logs
from tests.fakes.object_shelf import ObjectShelf, RefusedError

from mooring_agent.core.certificate_plan import Lives
from mooring_agent.core.errors import ErrorKind, MooringError
from mooring_agent.webhook.authority import Pair
from mooring_agent.webhook.certificate_round import CertificateRound, Look
from mooring_agent.webhook.certificate_secret import Kept, ca_bundles, read_bundle, read_secret
from mooring_agent.webhook.kubernetes_objects import Kind, Object
from mooring_agent.webhook.settings import SelfManaged

MANAGED = SelfManaged(namespace="mooring", service="mooring-webhook", secret="s", lease="l", configuration="c")
SERVICE = x509.DNSName("mooring-webhook.mooring.svc")
NAMES = {Kind.SECRET: "s", Kind.LEASE: "l", Kind.CONFIGURATION: "c"}
LIVES = Lives()
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)


class _Pause:
    """Awaiting it gives the other replica a turn; what is sent back is what becomes of the call."""

    def __await__(self) -> Generator[None, str, str]:
        return (yield)


class _SteppedObjects:
    """Each call pauses before it takes effect and after it."""

    def __init__(self, shelf: ObjectShelf) -> None:
        self._shelf = shelf

    async def read(self, kind: Kind) -> Object:
        return await self._call("get", kind, NAMES[kind])

    async def patch(self, kind: Kind, content: Object, read: Object) -> Object:
        version = {"resourceVersion": read["metadata"]["resourceVersion"]}
        return await self._call("patch", kind, NAMES[kind], {**content, "metadata": version})

    async def _call(self, verb: str, kind: Kind, *arguments: Any) -> Object:
        away = MooringError(ErrorKind.UNREACHABLE, f"{verb} {kind}: away")
        if await _Pause() == "lost":
            raise away
        try:
            answer: Object = getattr(self._shelf, verb)(kind.value, *arguments)
        except RefusedError as error:
            kinds = {404: ErrorKind.NOT_FOUND, 409: ErrorKind.ALREADY_EXISTS}
            raise MooringError(kinds[error.status], str(error)) from error
        if await _Pause() == "lost":
            raise away
        return answer


def verify(leaf: Pair, bundle: bytes, now: datetime) -> None:
    """As an API server does it. AssertionError where it would not take the leaf."""
    authorities = read_bundle(bundle)
    assert authorities, "nobody is trusted"
    policy = PolicyBuilder().store(Store(authorities)).time(now.replace(tzinfo=None))
    try:
        policy.build_server_verifier(SERVICE).verify(leaf.certificate, [])
    except VerificationError as error:
        raise AssertionError(f"at {now} a leaf is not verified by {len(authorities)} CAs") from error


class _World:
    """A cluster, its time, and API servers that trust what was published in the last `settle`."""

    def __init__(self) -> None:
        self.shelf = ObjectShelf()
        for kind in (Kind.SECRET, Kind.LEASE):
            self.shelf.create(kind, {"metadata": {"name": NAMES[kind]}})
        self.shelf.create(Kind.CONFIGURATION, configuration("pods.mooring.dev", "others.mooring.dev"))
        self.now = BEGIN
        self.trusted: list[tuple[datetime, bytes]] = [(BEGIN, b"")]
        self.leaves: dict[str, str] = {}
        """The CA of each, by id."""
        self.not_yet_trusted: set[str] = set()
        """CAs that signed when nothing valid was served: that they are trusted only now is no loss."""
        self._ends_at = BEGIN
        self._noted = 0
        self._verified: set[tuple[str, bytes]] = set()

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
            held = kept.held.leaf
            assert held is not None
            assert held.authority, "a leaf of a CA that is kept"
            self.leaves[kept.leaf.id] = held.authority
            if self._ends_at <= self.now:
                self.not_yet_trusted.add(held.authority)
            self._ends_at = held.ends_at

    def check(self, leaf: Pair) -> None:
        """Somebody serves it now: every API server must take it."""
        if self.leaves[leaf.id] not in self.not_yet_trusted and self.now < leaf.certificate.not_valid_after_utc:
            for _, bundle in self.trusted:
                # Once: until it expires, its CA does not.
                if (leaf.id, bundle) not in self._verified:
                    verify(leaf, bundle, self.now)
                    self._verified.add((leaf.id, bundle))

    def kept(self) -> Kept:
        return read_secret(self.shelf.get(Kind.SECRET, "s"))

    def _published(self) -> bytes:
        """What all webhooks trust."""
        first, second = ca_bundles(self.shelf.get(Kind.CONFIGURATION, "c")).values()
        assert first == second
        return base64.b64decode(first)


def configuration(*webhooks: str) -> dict[str, Any]:
    """As the chart installs it."""
    service = {"name": "mooring-webhook", "namespace": "mooring"}
    return {
        "metadata": {"name": "c"},
        "webhooks": [{"name": name, "rules": [], "clientConfig": {"service": service}} for name in webhooks],
    }


def ids(bundle: bytes) -> set[str]:
    return {Pair(certificate=one, key=None).id for one in read_bundle(bundle)}


class _Replica:
    """A webhook. It serves what it found last, as soon as it has loaded that."""

    _numbers = count()

    def __init__(self, world: _World) -> None:
        self._world = world
        self._look: Coroutine[None, str | None, Look] | None = None
        self.found: Pair | None = None
        self.serves: Pair | None = None
        self.start()

    def start(self) -> None:
        """Again, perhaps in the middle of a look; the files are still there."""
        if self._look is not None:
            self._look.close()
            self._look = None
        self._round = CertificateRound(
            _SteppedObjects(self._world.shelf),
            MANAGED,
            f"replica-{next(self._numbers)}",
            lives=LIVES,
            lease_seconds=30,
            now=lambda: self._world.now,
            monotonic=lambda: (self._world.now - BEGIN).total_seconds(),
        )

    def step(self, outcome: str = "fine") -> Look | None:
        """To the next pause, or the end of the look."""
        try:
            if self._look is None:
                self._look = self._round.look()
                self._look.send(None)
            else:
                self._look.send(outcome)
        except StopIteration as end:
            self._look = None
            look: Look = end.value
            if look.kept is not None and look.kept.leaf is not None:
                self.found = look.kept.leaf
            return look
        finally:
            self._world.note()
        return None

    def look(self) -> Look:
        """A whole one, without anybody in between."""
        while True:
            look = self.step()
            if look is not None:
                return look

    def load(self) -> None:
        self.serves = self.found


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
                if one.serves is not None:
                    world.check(one.serves)
    assert len(set(world.leaves.values())) > (1 if seed % 4 else 0), "it did rotate"


def test_two_replicas_that_look_every_five_days_for_years_never_serve_an_expired_leaf() -> None:
    world = _World()
    replicas = [_Replica(world), _Replica(world)]
    most = 0
    for day in range(0, 3 * 365, 5):
        for replica in replicas:
            assert replica.look().published
            replica.load()
            world.now += timedelta(minutes=11)
        for replica in replicas:
            assert replica.serves is not None
            assert replica.serves.certificate.not_valid_after_utc - world.now > 20 * DAY
            world.check(replica.serves)
        most = max(most, len(world.kept().authorities))
        world.now = BEGIN + (day + 5) * DAY
    assert len(set(world.leaves.values())) == 5, "a CA every eight months"
    assert len(world.leaves) < 30, "a leaf every two months"
    assert most == 2


def test_only_the_holder_of_the_lease_writes_and_another_takes_over_when_it_is_gone() -> None:
    world = _World()
    one, other = _Replica(world), _Replica(world)
    assert one.look().published
    holder = world.shelf.get(Kind.LEASE, "l")["spec"]["holderIdentity"]
    wipe(world)
    assert not other.look().published
    assert world.shelf.get(Kind.LEASE, "l")["spec"]["holderIdentity"] == holder
    assert one.look().published
    wipe(world)
    assert not other.look().published
    world.now += timedelta(seconds=31)
    assert other.look().published
    lease = world.shelf.get(Kind.LEASE, "l")["spec"]
    assert lease["holderIdentity"] != holder
    assert lease["leaseTransitions"] == 2


def test_of_two_that_find_the_lease_free_the_one_that_got_it_alone_says_so() -> None:
    world = _World()
    looking = [_Replica(world), _Replica(world)]
    with capture_logs() as lines:
        while looking:
            looking = [replica for replica in looking if replica.step() is None]
    assert [line["event"] for line in lines].count("lease.taken") == 1


def wipe(world: _World) -> None:
    """As somebody does who applies a manifest without caBundle."""
    webhooks = world.shelf.get(Kind.CONFIGURATION, "c")["webhooks"]
    wiped = [{"name": one["name"], "clientConfig": {"caBundle": None}} for one in webhooks]
    world.shelf.patch(Kind.CONFIGURATION, "c", {"webhooks": wiped})


def test_what_others_wrote_into_our_objects_stays() -> None:
    world = _World()
    replica = _Replica(world)
    replica.look()
    world.shelf.patch(Kind.SECRET, "s", {"metadata": {"labels": {"team": "ours"}}, "data": {"note": "aGVsbG8="}})
    world.now += 70 * DAY
    before = world.kept().leaf
    assert replica.look().published
    assert world.kept().leaf != before
    secret = world.shelf.get(Kind.SECRET, "s")
    assert secret["metadata"]["labels"] == {"team": "ours"}
    assert secret["data"]["note"] == "aGVsbG8="
    webhooks = world.shelf.get(Kind.CONFIGURATION, "c")["webhooks"]
    assert all(one["clientConfig"]["service"]["name"] == "mooring-webhook" for one in webhooks)


def test_a_secret_that_is_emptied_has_everything_renewed_at_once() -> None:
    """The way to end a CA whose key is known to somebody."""
    world = _World()
    replica = _Replica(world)
    replica.look()
    before = ids(world.trusted[-1][1])
    world.shelf.patch(Kind.SECRET, "s", {"data": None})
    assert replica.look().published
    assert not before & {one.id for one in world.kept().authorities}
    replica.load()
    assert replica.serves is not None
    verify(
        replica.serves,
        base64.b64decode(next(iter(ca_bundles(world.shelf.get(Kind.CONFIGURATION, "c")).values()))),
        world.now,
    )


def test_without_the_configuration_the_leaf_is_made_and_what_is_missing_is_said() -> None:
    world = _World()
    world.shelf.delete(Kind.CONFIGURATION, "c")
    replica = _Replica(world)
    look = replica.look()
    assert look.kept is not None
    assert look.kept.leaf is not None
    assert not look.published
    assert [one.kind for one in look.problems] == [ErrorKind.NOT_FOUND]
    world.shelf.create(Kind.CONFIGURATION, configuration("pods.mooring.dev", "others.mooring.dev"))
    assert replica.look().published
