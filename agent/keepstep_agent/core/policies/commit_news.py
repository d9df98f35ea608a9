"""Whom a commit is told: a URL and a command, as CloudEvents, each at least once.

What is due is journaled in the same transaction as the commit, and is due until a receiver has taken it. The news holds
all that is told, because the checkpoint may be forgotten before.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote

from keepstep_agent.core.model import CommitNews, Receiver
from keepstep_agent.core.settings.values import EventSettings

_MOST_DUE: Final = 1_000
"""How much news waits for a receiver. Beyond that the oldest is dropped: whoever was away for so long looks himself."""

_TYPE: Final = "dev.keepstep.checkpoint.committed"


def receivers_of(settings: EventSettings) -> tuple[Receiver, ...]:
    wanted = {Receiver.URL: settings.event_url, Receiver.COMMAND: settings.event_command}
    return tuple(receiver for receiver, setting in wanted.items() if setting)


@dataclass(slots=True)
class UntoldNews:
    """What receivers have still to be told. `dropped` counts what never will be."""

    _due: dict[Receiver, dict[str, CommitNews]] = field(default_factory=lambda: {receiver: {} for receiver in Receiver})
    dropped: int = 0

    def of(self, receiver: Receiver) -> list[CommitNews]:
        """Return what this receiver has still to be told, oldest first."""
        return list(self._due[receiver].values())

    def next_of(self, receiver: Receiver) -> CommitNews | None:
        return next(iter(self._due[receiver].values()), None)

    @property
    def count(self) -> int:
        return sum(len(due) for due in self._due.values())

    def note(self, news: CommitNews, receivers: Iterable[Receiver]) -> None:
        for receiver in receivers:
            due = self._due[receiver]
            due[news.info.save] = news
            if len(due) > _MOST_DUE:
                del due[next(iter(due))]
                self.dropped += 1

    def taken(self, save: str, receiver: Receiver) -> None:
        self._due[receiver].pop(save, None)

    def has(self, save: str) -> bool:
        """Whether a receiver has still to be told of this save."""
        return any(save in due for due in self._due.values())

    def newest_committed_at(self) -> float | None:
        """Return when the last commit was that somebody has still to be told (unix seconds)."""
        newest = [next(reversed(due.values())).committed_at for due in self._due.values() if due]
        return max(newest, default=None)


def cloud_event(news: CommitNews, destination: str) -> bytes:
    """Return the CloudEvent, as structured JSON. Source and id are the same however often it is sent."""
    info = news.info
    place = {"snapshot": info.step} if info.is_snapshot else {"step": info.step}
    committed_at = datetime.fromtimestamp(news.committed_at, UTC)
    return json.dumps(
        {
            "specversion": "1.0",
            "id": info.save,
            "source": quote(destination, safe=":/"),
            "type": _TYPE,
            "subject": info.name,
            "time": committed_at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "datacontenttype": "application/json",
            "data": {
                "name": info.name,
                "save": info.save,
                **place,
                "kind": info.kind.value,
                "world_size": info.world_size,
                "size_bytes": news.size_bytes,
                "attempt": news.attempt,
                "destination": destination,
            },
        }
    ).encode()
