"""Whom a commit is told: due with the commit, until it is taken, whatever becomes of the agent in between."""

import json
from dataclasses import replace

import pytest
from tests.core.play import Play
from tests.fakes.fake_journal import FakeJournal

from keepstep_agent.core.agent.commands import Exit
from keepstep_agent.core.agent.events import Committed, NewsDue, NewsTaken, StopRequested, TerminationNoticed
from keepstep_agent.core.agent.reducer import step
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.model import CommitNews, Kind, Phase, Receiver, SaveInfo
from keepstep_agent.core.policies import commit_news
from keepstep_agent.core.policies.commit_news import cloud_event
from keepstep_agent.core.settings.values import EventSettings, Settings
from keepstep_agent.runtime.engine.event_codec import decode_event, encode_event
from keepstep_agent.runtime.engine.journaling import compact

BOTH = EventSettings(event_url="https://receiver.example/hook", event_command="tell", event_timeout_seconds=10.0)
URL_ALONE = EventSettings(event_url="https://receiver.example/hook")
NEWS = CommitNews(
    info=SaveInfo(save="a-1", name="checkpoint-7", step=7, kind=Kind.FINAL, world_size=2),
    attempt="job-1",
    size_bytes=300,
    committed_at=1_767_225_600.25,
)


def told(events: EventSettings = BOTH) -> Play:
    play = Play()
    play.state.settings = replace(play.state.settings, attempt="job-1", events=events)
    return play


def commit(play: Play, save: str) -> None:
    play.announce(save)
    play.finish()


def due(state: State) -> dict[str, list[str]]:
    return {receiver.value: [news.info.save for news in state.untold_news.of(receiver)] for receiver in Receiver}


def restarted(play: Play, settings: Settings | None = None) -> State:
    """As a restart leaves it: the journal is compacted, then replayed."""
    journal = FakeJournal()
    journal.append([encode_event(event) for event in play.journal])
    compact(play.state, journal)
    state = State(settings=settings or play.state.settings)
    for record in journal.replay():
        step(state, decode_event(record))
    return state


def test_news_is_journaled_with_its_commit_and_due_until_each_receiver_has_taken_it() -> None:
    play = told()
    commit(play, "a")
    position = next(number for number, event in enumerate(play.journal) if isinstance(event, Committed))
    assert isinstance(play.journal[position + 1], NewsDue)
    assert due(play.state) == {"url": ["a"], "command": ["a"]}
    play.feed(NewsTaken(at=play.now, save="a", receiver=Receiver.URL))
    assert due(play.state) == {"url": [], "command": ["a"]}
    assert due(restarted(play)) == {"url": [], "command": ["a"]}
    play.feed(NewsTaken(at=play.now, save="a", receiver=Receiver.COMMAND))
    assert due(restarted(play)) == {"url": [], "command": []}


def test_news_outlives_its_checkpoint_and_keeps_the_order_of_the_commits() -> None:
    play = told(URL_ALONE)
    saves = [f"save-{number:02d}" for number in range(20)]
    for save in saves:
        commit(play, save)
    assert len(play.state.checkpoints) < len(saves)
    assert due(restarted(play)) == {"url": saves, "command": []}


def test_a_receiver_that_the_settings_no_longer_name_is_owed_nothing() -> None:
    play = told()
    commit(play, "a")
    assert due(restarted(play, replace(play.state.settings, events=URL_ALONE))) == {"url": ["a"], "command": []}


def test_without_receivers_nothing_is_journaled() -> None:
    play = told(EventSettings())
    commit(play, "a")
    assert not any(isinstance(event, NewsDue) for event in play.journal)


def test_of_a_jobs_agents_only_that_of_rank_0_tells() -> None:
    play = told()
    play.announce("a", rank=1, world_size=2)
    play.finish()
    play.feed(Committed(at=play.now, work=WorkId(Operation.COMMIT, "a")))
    assert play.phase("a") is Phase.COMMITTED
    assert due(play.state) == {"url": [], "command": []}


def test_the_oldest_is_dropped_when_a_receiver_is_away_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_news, "_MOST_DUE", 2)
    play = told(URL_ALONE)
    for save in ("a", "b", "c"):
        commit(play, save)
    assert due(play.state) == {"url": ["b", "c"], "command": []}
    assert play.state.untold_news.dropped == 1


def test_an_event_says_what_was_committed_and_is_the_same_each_time() -> None:
    body = cloud_event(NEWS, "s3://bucket/runs/é one")
    assert body == cloud_event(NEWS, "s3://bucket/runs/é one")
    assert json.loads(body) == {
        "specversion": "1.0",
        "id": "a-1",
        "source": "s3://bucket/runs/%C3%A9%20one",
        "type": "dev.keepstep.checkpoint.committed",
        "subject": "checkpoint-7",
        "time": "2026-01-01T00:00:00.250Z",
        "datacontenttype": "application/json",
        "data": {
            "name": "checkpoint-7",
            "save": "a-1",
            "step": 7,
            "kind": "final",
            "world_size": 2,
            "size_bytes": 300,
            "attempt": "job-1",
            "destination": "s3://bucket/runs/é one",
        },
    }


def test_a_snapshots_number_is_no_step() -> None:
    info = replace(NEWS.info, name="node-0", step=3, kind=Kind.SNAPSHOT)
    data = json.loads(cloud_event(replace(NEWS, info=info), "file:///bucket"))["data"]
    assert (data["snapshot"], "step" in data) == (3, False)


def exits(play: Play) -> bool:
    return play.state.termination.exiting


def test_an_exit_waits_for_a_receiver_for_one_time_out_and_no_longer() -> None:
    play = told(URL_ALONE)
    commit(play, "a")
    began_at = play.state.checkpoints["a"].committed_at
    assert not any(isinstance(one, Exit) for one in play.feed(StopRequested(at=play.now, trainers_gone=True)))
    play.wait_until(lambda: exits(play))
    assert play.now == began_at + URL_ALONE.event_timeout_seconds


def test_an_exit_waits_no_longer_once_the_event_is_taken() -> None:
    play = told(URL_ALONE)
    commit(play, "a")
    play.feed(StopRequested(at=play.now, trainers_gone=True))
    assert not exits(play)
    play.feed(NewsTaken(at=play.now, save="a", receiver=Receiver.URL))
    assert exits(play)


def test_an_exit_waits_never_beyond_the_deadline() -> None:
    play = told(replace(URL_ALONE, event_timeout_seconds=3600.0))
    commit(play, "a")
    deadline = play.now + 30
    play.feed(TerminationNoticed(at=play.now, deadline=deadline, source="test"))
    play.feed(StopRequested(at=play.now, trainers_gone=True))
    play.wait_until(lambda: exits(play))
    assert play.now <= deadline
