"""Azure's scheduled events: one list for all machines of a scale set, filtered by this machine's name.

An event begins at `NotBefore`, or earlier once all have approved it; Keepstep does not approve. Spot machines have
30 s.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from keepstep_agent.adapters.preemption.metadata_service import (
    ANSWER_SECONDS,
    Answer,
    MetadataService,
    not_understood,
    unix_seconds,
)
from keepstep_agent.core.errors import PreemptionSourceError
from keepstep_agent.ports import TerminationNotice

_HEADERS: Final = {"Metadata": "true"}
_EVENTS: Final = "/metadata/scheduledevents"
_EVENTS_QUERY: Final = {"api-version": "2020-07-01"}
_NAME: Final = "/metadata/instance/compute/name"
_NAME_QUERY: Final = {"api-version": "2021-02-01", "format": "text"}
# A machine's first request turns its scheduled events on, which takes longer.
_FIRST_ANSWER_SECONDS: Final = 10.0
# Without Freeze, which only pauses the machine for seconds.
_ENDING_TYPES: Final = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})


class AzurePreemption:
    """An event that has already begun has no `NotBefore`; its notice has 0 seconds left."""

    cloud = "azure"
    pause_seconds = 1.0

    def __init__(self, service: MetadataService) -> None:
        self._service = service
        self._name = ""

    async def answers(self) -> bool:
        try:
            await self._own_name()
        except PreemptionSourceError:
            return False
        return True

    async def look(self) -> Sequence[TerminationNotice]:
        name = await self._own_name()
        answer = await self._get(_EVENTS, _EVENTS_QUERY, _FIRST_ANSWER_SECONDS)
        return list(_notices(answer, name))

    async def close(self) -> None:
        await self._service.close()

    async def _own_name(self) -> str:
        if not self._name:
            self._name = (await self._get(_NAME, _NAME_QUERY)).text.strip().casefold()
        return self._name

    async def _get(self, path: str, query: dict[str, str], answer_seconds: float = ANSWER_SECONDS) -> Answer:
        answer = await self._service.request(path, headers=_HEADERS, query=query, answer_seconds=answer_seconds)
        if answer.status != 200:
            raise self._service.refusal(path, answer)
        return answer


def _notices(answer: Answer, name: str) -> Iterator[TerminationNotice]:
    told = answer.json()
    try:
        events = [
            (one["EventType"], one["EventId"], one.get("NotBefore"), [text.casefold() for text in one["Resources"]])
            for one in told["Events"]
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise not_understood(str(told)) from error
    for event_type, event, when, machines in events:
        if event_type in _ENDING_TYPES and name in machines:
            left_seconds = unix_seconds(when) - answer.at if when else 0.0
            yield TerminationNotice(key=event, left_seconds=left_seconds, source=f"azure {event_type.lower()}")
