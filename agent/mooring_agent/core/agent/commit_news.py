"""Whom a commit is told: a URL and a command, as CloudEvents, each at least once.

What is due is journaled in the same transaction as the commit, and is due until a receiver has taken it. The news holds
all that is told, because the checkpoint may be forgotten before. Of a job's agents the one that holds rank 0 tells.
"""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote

from mooring_agent.core.agent.checkpoint import Checkpoint
from mooring_agent.core.agent.commands import Record
from mooring_agent.core.agent.events import NewsDue, NewsTaken
from mooring_agent.core.agent.state import State
from mooring_agent.core.model import CommitNews, Receiver
from mooring_agent.core.settings.values import EventSettings

_MOST_DUE: Final = 1_000
"""How much news waits for a receiver. Beyond that the oldest is dropped: whoever was away for so long looks himself."""

_TYPE: Final = "dev.mooring.checkpoint.committed"


def receivers_of(settings: EventSettings) -> tuple[Receiver, ...]:
    wanted = {Receiver.URL: settings.event_url, Receiver.COMMAND: settings.event_command}
    return tuple(receiver for receiver, setting in wanted.items() if setting)


def commit_news(state: State, checkpoint: Checkpoint) -> Iterator[Record]:
    """Yield the news of a checkpoint that has just been committed, if somebody is to be told."""
    receivers = receivers_of(state.settings.events)
    if receivers and (checkpoint.info.is_snapshot or 0 in checkpoint.contributions):
        news = CommitNews(
            info=checkpoint.info,
            attempt=state.settings.attempt,
            size_bytes=checkpoint.size_bytes,
            committed_at=checkpoint.committed_at,
        )
        yield Record(event=NewsDue(at=checkpoint.committed_at, news=news, receivers=receivers))


def note_due(state: State, event: NewsDue) -> None:
    for receiver in event.receivers:
        # An earlier life of this agent may have had other settings.
        if receiver not in receivers_of(state.settings.events):
            continue
        due = state.news_due[receiver]
        due[event.news.info.save] = event.news
        if len(due) > _MOST_DUE:
            del due[next(iter(due))]
            state.news_dropped += 1


def note_taken(state: State, event: NewsTaken) -> None:
    state.news_due[event.receiver].pop(event.save, None)


def is_due(state: State, save: str) -> bool:
    """Whether a receiver still has to be told of this save."""
    return any(save in due for due in state.news_due.values())


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
