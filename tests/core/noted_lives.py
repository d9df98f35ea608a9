"""Lives of agents as a test tells them: entries at given moments, numbered by themselves."""

from typing import Any

from keepstep_agent.core.stored.ledger import (
    AgentEnded,
    AgentLife,
    AgentStarted,
    LedgerEntry,
    Noticed,
    RanksChanged,
    Resumed,
    SaveCommitted,
    Saved,
)


class NotedLife:
    """The ledger of one agent. The methods add an entry each."""

    def __init__(self, agent: str, *, attempt: str = "job", place: str = "") -> None:
        self.agent, self.attempt, self.place = agent, attempt, place
        self.entries: list[LedgerEntry] = []

    def start(self, at: float, *, start: str = "", restore: tuple[float, float] | None = None, **fields: Any) -> None:
        began_at, restored_at = restore or (None, None)
        self._add(
            AgentStarted, at, start=start or self.agent, restore_began_at=began_at, restored_at=restored_at, **fields
        )

    def resumes(self, at: float, step: int, *, restore: tuple[float, float], start: str = "") -> None:
        self.start(at, start=start, restore=restore, resumed=Resumed.SAVE, step=step, save=f"save-{step}")

    def ranks(self, at: float, count: int) -> None:
        self._add(RanksChanged, at, ranks=count)

    def save(self, begun_at: float | None, at: float, step: int, *, kind: str = "periodic", **fields: Any) -> None:
        self._add(Saved, at, save=f"save-{step}", step=step, save_kind=kind, begun_at=begun_at, **fields)

    def commit(self, at: float, step: int) -> None:
        self._add(SaveCommitted, at, save=f"save-{step}", size_bytes=10, upload_seconds=1.0)

    def notice(self, at: float) -> None:
        self._add(Noticed, at, source="spot", grace_seconds=30.0)

    def add(self, entry_type: Any, at: float, **fields: Any) -> None:
        self._add(entry_type, at, **fields)

    def end(self, at: float) -> None:
        self._add(AgentEnded, at, code=0)

    @property
    def life(self) -> AgentLife:
        return AgentLife(
            agent=self.agent, attempt=self.attempt, place=self.place, node_rank=0, entries=tuple(self.entries)
        )

    def _add(self, entry_type: Any, at: float, **fields: Any) -> None:
        self.entries.append(entry_type(number=len(self.entries) + 1, at=at, **fields))


def killed_and_resumed() -> list[NotedLife]:
    """A run with known losses, of 1,000 s in all, and steps of 1 s.

    The first start begins at 1,000 and restores nothing in 10 s; its ranks come 20 s later, at 1,030. It saves step 100
    from 1,130 to 1,135 (stall 5 s), step 200 from 1,235 to 1,240, and is killed at 1,300, 60 steps later. Nobody runs
    for 40 s. The second start restores step 200 from 1,340 to 1,365 (25 s), and its ranks come at 1,380 (15 s). It is
    told to end at 1,900, when it has done 520 steps, saves step 720 just in time in 4 s, ranks end at 1,910, and the
    agent at 2,000.
    """
    first, second = NotedLife("first"), NotedLife("second")
    first.start(1010, restore=(1000, 1010), resumed=Resumed.NOTHING)
    first.ranks(1030, 1)
    first.save(1130, 1135, 100)
    first.commit(1140, 100)
    first.save(1235, 1240, 200)
    first.commit(1250, 200)
    first.ranks(1300, 1)
    second.resumes(1366, 200, restore=(1340, 1365))
    second.ranks(1380, 1)
    second.notice(1900)
    second.save(1900, 1904, 720, kind="just-in-time")
    second.commit(1906, 720)
    second.ranks(1910, 0)
    second.end(2000)
    return [first, second]
