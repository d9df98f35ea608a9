"""One replica's look at its cluster: whose turn it is, what is due, what is published.

Owns the order of the calls, on which the safety of a rotation rests, whoever believes that it is their turn:

- The configuration is read before the Secret and patched only if it is still the one that was read. So no bundle that
  is older than another replica's is ever published over it.
- The Secret is written before its bundle is published, and only if it is still the one that was read.

What fails is told, not raised: a replica that cannot write still reads, and serves what it has.
"""

import base64
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TypeVar

import structlog

from mooring_agent.core.certificate_plan import Lives, Publication, plan
from mooring_agent.core.errors import MooringError
from mooring_agent.core.lease_turn import LeaseRecord, Sighting, Turn, turn
from mooring_agent.webhook.certificate_secret import Kept, ca_bundles, published_in, read_secret
from mooring_agent.webhook.kubernetes_objects import Kind, Object, Objects
from mooring_agent.webhook.settings import SelfManaged

_T = TypeVar("_T")
_CLUSTER_DOMAIN: Final = "cluster.local"

log = structlog.get_logger("mooring.webhook")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What was found. `kept` is None where the Secret could not be read. `published`: API servers trust its leaf."""

    kept: Kept | None
    published: bool
    problems: tuple[MooringError, ...]


class CertificateRound:
    """`identity` is this replica's in the Lease; `now` and `monotonic` are its clocks."""

    def __init__(
        self,
        objects: Objects,
        managed: SelfManaged,
        identity: str,
        *,
        lives: Lives,
        lease_seconds: float,
        now: Callable[[], datetime],
        monotonic: Callable[[], float],
    ) -> None:
        self._objects = objects
        self._identity = identity
        self._lives = lives
        self._lease_seconds = lease_seconds
        self._now = now
        self._monotonic = monotonic
        service = f"{managed.service}.{managed.namespace}.svc"
        self._names = frozenset({service, f"{service}.{_CLUSTER_DOMAIN}"})
        self._sighting: Sighting | None = None
        self._publication = Publication()
        self._problems: list[MooringError] = []

    async def look(self) -> Look:
        """Once, and do what is due if it is our turn."""
        self._problems = []
        leads = await self._told(self._take_turn()) or False
        configuration = await self._told(self._configuration())
        kept = None
        secret = await self._told(self._objects.read(Kind.SECRET))
        if secret is not None:
            kept = read_secret(secret)
            if leads:
                kept = await self._told(self._renew(secret, kept)) or kept
                if configuration is not None and kept.authorities:
                    configuration = await self._told(self._publish(kept, configuration)) or configuration
        return Look(
            kept=kept,
            published=kept is not None and configuration is not None and _verifies(configuration, kept),
            problems=tuple(self._problems),
        )

    async def give_back(self) -> None:
        """The lease, so that nobody has to wait until it runs out. Raises MooringError."""
        lease = await self._objects.read(Kind.LEASE)
        if _record(lease, self._lease_seconds).holder == self._identity:
            await self._objects.patch(Kind.LEASE, {"spec": {"holderIdentity": None}}, lease)

    async def _told(self, step: Awaitable[_T]) -> _T | None:
        try:
            return await step
        except MooringError as error:
            self._problems.append(error)
            return None

    async def _take_turn(self) -> bool:
        lease = await self._objects.read(Kind.LEASE)
        record = _record(lease, self._lease_seconds)
        what, self._sighting = turn(record, self._sighting, self._identity, self._monotonic())
        if what is Turn.WAIT:
            return False
        renewed = self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # a MicroTime has six digits, no fewer
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, round(self._lease_seconds)),
            "renewTime": renewed,
        }
        if what is Turn.TAKE:
            transitions = (lease.get("spec") or {}).get("leaseTransitions") or 0
            spec |= {"acquireTime": renewed, "leaseTransitions": transitions + 1}
        await self._objects.patch(Kind.LEASE, {"spec": spec}, lease)
        if what is Turn.TAKE:
            log.info("lease.taken", before=record.holder)
        return True

    async def _configuration(self) -> Object:
        configuration = await self._objects.read(Kind.CONFIGURATION)
        self._publication = self._publication.seen(published_in(configuration), self._now())
        return configuration

    async def _renew(self, secret: Object, kept: Kept) -> Kept:
        """What the Secret holds then."""
        now = self._now()
        due = plan(now, kept.held, self._publication, self._names, self._lives)
        if not due.changes(kept.held):
            return kept
        after = kept.after(due, self._names, now, self._lives)
        await self._objects.patch(Kind.SECRET, {"data": after.data()}, secret)
        log.info(
            "certificates.renewed",
            new_authority=due.make_authority,
            new_certificate=due.sign_with is not None,
            authorities=len(after.authorities),
        )
        return after

    async def _publish(self, kept: Kept, configuration: Object) -> Object:
        """The configuration, as it is then."""
        bundle = base64.b64encode(kept.bundle).decode()
        stale = [name for name, text in ca_bundles(configuration).items() if text != bundle]
        if not stale:
            return configuration
        webhooks = [{"name": name, "clientConfig": {"caBundle": bundle}} for name in stale]
        configuration = await self._objects.patch(Kind.CONFIGURATION, {"webhooks": webhooks}, configuration)
        log.info("authorities.published", authorities=len(kept.authorities))
        return configuration


def _record(lease: Object, lease_seconds: float) -> LeaseRecord:
    spec = lease.get("spec") or {}
    return LeaseRecord(
        holder=spec.get("holderIdentity") or "",
        renewed=spec.get("renewTime") or "",
        lasts_seconds=spec.get("leaseDurationSeconds") or lease_seconds,
    )


def _verifies(configuration: Object, kept: Kept) -> bool:
    leaf = kept.held.leaf
    return leaf is not None and leaf.authority in published_in(configuration)
