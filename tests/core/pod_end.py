"""News of a pod that ends: a notice, a stop, and which ranks are alive."""

from tests.core.play import Play

from keepstep_agent.core.agent.events import RanksSeen, StopRequested, TerminationNoticed

GRACE_SECONDS = 30.0


def notice(play: Play, *, grace_seconds: float | None = GRACE_SECONDS) -> tuple[object, ...]:
    deadline = None if grace_seconds is None else play.now + grace_seconds
    return play.feed(TerminationNoticed(at=play.now, deadline=deadline, source="test"))


def stop(play: Play, *, trainers_gone: bool = False) -> None:
    play.feed(StopRequested(at=play.now, trainers_gone=trainers_gone))


def ranks_alive(play: Play, *local_ranks: int) -> None:
    play.feed(RanksSeen(at=play.now, alive=frozenset(local_ranks)))
