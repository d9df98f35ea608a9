"""Certificates that the webhook makes for itself: made before it serves, renewed while it does, on every replica.

What the ServiceAccount must be allowed, and nothing more (names as in `SelfManaged`):

| where | API group | resource | name | verbs |
|---|---|---|---|---|
| Role in the webhook's namespace | "" | secrets | `secret` | get, patch |
| the same | coordination.k8s.io | leases | `lease` | get, patch |
| ClusterRole | admissionregistration.k8s.io | mutatingwebhookconfigurations | `configuration` | get, patch |

So the chart makes the three, the Secret and the Lease empty, and sets no `caBundle`: who may create Secrets may create
one with the token of any service account of the namespace. Every `clientConfig.caBundle` of the configuration is ours.
The folder for the certificates must be writable (an emptyDir, best with medium Memory). Until there is a certificate,
no port is open: probes must grant `Pace.begin_seconds`.

A Secret that is emptied has everything made anew at once, for a key that somebody knows.
"""

import asyncio
import contextlib
import math
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog

from mooring_agent.core.errors import ErrorKind, MooringError
from mooring_agent.webhook.certificate_files import put_pair, serves_until
from mooring_agent.webhook.certificate_round import CertificateRound, Look
from mooring_agent.webhook.kubernetes_objects import KubernetesObjects
from mooring_agent.webhook.settings import Pace, SelfManaged

_REMIND_SECONDS: Final = 600.0
_PATIENT_SECONDS: Final = 5.0
"""While an installation is under way, something is missing for a moment."""

log = structlog.get_logger("mooring.webhook")


@contextlib.asynccontextmanager
async def kept_certificates(managed: SelfManaged, folder: Path) -> AsyncIterator[None]:
    """Enter once `folder` has what to serve with, and keep it renewed. Raises MooringError when there is none in time.

    An API server that is away holds up nobody who has a certificate that is valid.
    """
    pace = managed.pace
    # One thread: what a replica does to its cluster has an order.
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="certificates")
    try:
        objects = KubernetesObjects(managed, executor, pace.call_seconds)
        await objects.connect()
        round_ = CertificateRound(
            objects,
            managed,
            f"{socket.gethostname()}-{secrets.token_hex(4)}",
            lives=managed.lives,
            lease_seconds=pace.lease_seconds,
            now=lambda: datetime.now(UTC),
            monotonic=time.monotonic,
        )
        try:
            async with _keeping(_Keeper(round_, folder, pace)):
                yield
        finally:
            await _give_back(round_, pace.call_seconds)
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


@contextlib.asynccontextmanager
async def _keeping(keeper: "_Keeper") -> AsyncIterator[None]:
    await keeper.begin()
    keeping = asyncio.create_task(keeper.keep())
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


async def _give_back(round_: CertificateRound, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await round_.give_back()
    except (MooringError, TimeoutError) as error:
        log.info("lease.kept", error=str(error))  # it runs out by itself


class _Keeper:
    """The loop around the rounds."""

    def __init__(self, round_: CertificateRound, folder: Path, pace: Pace) -> None:
        self._round = round_
        self._folder = folder
        self._pace = pace
        self._told: dict[tuple[ErrorKind, str], float] = {}

    async def begin(self) -> None:
        """Until there is something to serve with, and, if that comes soon, API servers trust it."""
        began_at = time.monotonic()
        while True:
            look = await self._look()
            waited_seconds = time.monotonic() - began_at
            if waited_seconds >= _PATIENT_SECONDS:
                self._tell(look.problems)
            ends_at = serves_until(self._folder)
            if ends_at is not None and ends_at > datetime.now(UTC):
                if look.published or look.kept is None or waited_seconds >= self._pace.publish_seconds:
                    return
            elif waited_seconds >= self._pace.begin_seconds:
                last = look.problems[-1] if look.problems else None
                raise MooringError(
                    last.kind if last else ErrorKind.TIMED_OUT,
                    f"no certificate to serve with after {waited_seconds:.0f} s: {last or 'nobody makes one'}",
                    hint=last.hint if last else "see the log of the replica that holds the Lease",
                )
            await asyncio.sleep(self._pace.retry_seconds)

    async def keep(self) -> None:
        """For ever."""
        seconds = self._pace.look_seconds
        while True:
            await asyncio.sleep(seconds)
            look = await self._look()
            self._tell(look.problems)
            raced = any(one.kind is ErrorKind.ALREADY_EXISTS for one in look.problems)
            seconds = self._pace.retry_seconds if raced else self._pace.look_seconds

    async def _look(self) -> Look:
        try:
            look = await self._round.look()
            if look.kept is not None and look.kept.leaf is not None:
                await asyncio.to_thread(put_pair, self._folder, look.kept.leaf)
        except MooringError as error:
            return Look(kept=None, published=False, problems=(error,))
        except Exception:
            # A fault of ours in here must not end a webhook that serves.
            log.exception("certificates.bug")
            return Look(kept=None, published=False, problems=())
        return look

    def _tell(self, problems: Iterable[MooringError]) -> None:
        """Each that needs something else done once, and again after a while; and when all are over."""
        now = time.monotonic()
        different = {(one.kind, one.hint): one for one in problems if one.kind is not ErrorKind.ALREADY_EXISTS}
        for key, problem in different.items():
            if now - self._told.get(key, -math.inf) >= _REMIND_SECONDS:
                log.error("certificates.problem", error=str(problem), kind=problem.kind.value, hint=problem.hint)
                self._told[key] = now
        if self._told and not different:
            log.info("certificates.well")
        self._told = {key: at for key, at in self._told.items() if key in different}
