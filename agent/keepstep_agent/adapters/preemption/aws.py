"""EC2's instance metadata service, version 2: reads a token, then the spot notice and the scheduled events.

Falls back to version 1, without a token, where only that answers. A spot machine has two minutes from its notice;
scheduled events are known days before.
"""

import asyncio
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Final

from keepstep_agent.adapters.preemption.metadata_service import Answer, MetadataService, not_understood, unix_seconds
from keepstep_agent.core.errors import ErrorKind, PreemptionSourceError
from keepstep_agent.core.settings.table import spelled
from keepstep_agent.ports import TerminationNotice

_TOKEN: Final = "/latest/api/token"  # noqa: S105 - a path
_ROOT: Final = "/latest/meta-data/"
_SPOT: Final = "/latest/meta-data/spot/instance-action"
_MAINTENANCE: Final = "/latest/meta-data/events/maintenance/scheduled"
_TOKEN_SECONDS: Final = 21600
# A request for a token that is not answered takes the whole time-out, so it is repeated seldom.
_WITHOUT_TOKEN_SECONDS: Final = 300
_SPOT_SECONDS: Final = 120.0
_ENDING_ACTIONS: Final = frozenset({"terminate", "stop"})
_ENDING_EVENTS: Final = frozenset(
    {"instance-stop", "instance-retirement", "instance-reboot", "system-reboot", "instance-terminate"}
)
_HOPS_HINT: Final = (
    "the machine's hop limit keeps pods from its metadata service: set HttpPutResponseHopLimit to 2, "
    f"or set {spelled('termination.preemption_source')} to off"
)
_DISABLED_HINT: Final = (
    f"enable the machine's metadata service, or set {spelled('termination.preemption_source')} to off"
)


class AwsPreemption:
    """AWS asks clients to wait five seconds between two looks."""

    cloud = "aws"
    pause_seconds = 5.0

    def __init__(self, service: MetadataService) -> None:
        self._service = service
        self._token = ""
        self._renew_at = 0.0

    async def answers(self) -> bool:
        try:
            if (await self._ask_token()).status == 200:
                return True
        except PreemptionSourceError:
            # Beyond the hop limit only the answer with the token is lost. The next request shows that this is AWS, and
            # `look` then reports what is wrong.
            pass
        try:
            return (await self._service.request(_ROOT)).status in (200, 401)
        except PreemptionSourceError:
            return False

    async def look(self) -> Sequence[TerminationNotice]:
        spot = await self._get(_SPOT)
        if spot is not None and (found := list(_spot_notices(spot))):
            return found
        maintenance = await self._get(_MAINTENANCE)
        return [] if maintenance is None else list(_maintenance_notices(maintenance))

    async def close(self) -> None:
        await self._service.close()

    async def _get(self, path: str) -> Answer | None:
        """Return the answer, or None for status 404: there is no notice of this sort."""
        headers = await self._headers()
        answer = await self._service.request(path, headers=headers)
        if answer.status == 401:
            self._renew_at = 0.0
        if answer.status == 401 and headers:
            # The token may be older than it seems, if the machine slept.
            answer = await self._service.request(path, headers=await self._headers())
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise self._service.refusal(path, answer, hint=_HOPS_HINT if answer.status == 401 else "")
        return answer

    async def _headers(self) -> dict[str, str]:
        now = asyncio.get_running_loop().time()
        if now >= self._renew_at:
            self._token = await self._new_token()
            self._renew_at = now + (_TOKEN_SECONDS / 2 if self._token else _WITHOUT_TOKEN_SECONDS)
        return {"X-aws-ec2-metadata-token": self._token} if self._token else {}

    async def _new_token(self) -> str:
        """Return a new token, or an empty one if only version 1 may answer.

        Beyond the hop limit a request for a token gets no answer at all.
        """
        try:
            answer = await self._ask_token()
        except PreemptionSourceError as error:
            if error.kind is ErrorKind.UNREACHABLE:
                return ""
            raise
        if answer.status in (404, 405):
            return ""
        if answer.status != 200:
            raise self._service.refusal(_TOKEN, answer, hint=_DISABLED_HINT)
        return answer.text

    async def _ask_token(self) -> Answer:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
        return await self._service.request(_TOKEN, method="PUT", headers=headers)


def _spot_notices(answer: Answer) -> Iterator[TerminationNotice]:
    """Yield the notice unless it is a hibernation, which begins at once and after which the machine goes on."""
    told = answer.json()
    try:
        action, when = told["action"], told["time"]
        left_seconds = datetime.fromisoformat(when).timestamp() - answer.at
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise not_understood(str(told)) from error
    if action in _ENDING_ACTIONS:
        # Two minutes at most, in case a clock is wrong.
        left_seconds = min(left_seconds, _SPOT_SECONDS)
        yield TerminationNotice(key=f"spot {action} {when}", left_seconds=left_seconds, source=f"aws spot {action}")


def _maintenance_notices(answer: Answer) -> Iterator[TerminationNotice]:
    told = answer.json()
    try:
        events = [(one["Code"], one.get("State", "active"), one["NotBefore"], one.get("EventId", "")) for one in told]
    except (AttributeError, KeyError, TypeError) as error:
        raise not_understood(str(told)) from error
    for code, state, when, event in events:
        if state == "active" and code in _ENDING_EVENTS:
            left_seconds = unix_seconds(when) - answer.at
            yield TerminationNotice(key=f"{event} {code} {when}", left_seconds=left_seconds, source=f"aws {code}")
