"""What of all runs a page shows: searched, sorted and cut into pages, as its address says."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Self
from urllib.parse import urlencode

from keepstep_agent.console.refresh import KnownRun
from keepstep_agent.console.settings import ROWS
from keepstep_agent.core.policies.run_overview import RunOverview, RunStanding, RunTime

_MOST_SEARCH_CHARACTERS: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of the table of runs. `value` sorts, `falling` is its first order; None comes last in both."""

    title: str
    value: Callable[[RunOverview, float], Any]
    falling: bool = True
    number: bool = True


COLUMNS: Final[Mapping[str, Column]] = MappingProxyType(
    {
        "run": Column(title="Run", value=lambda one, now: None, falling=False, number=False),
        "state": Column(title="State", value=lambda one, now: None, falling=False, number=False),
        "recovery": Column(title="Recovery point", value=lambda one, now: one.recovery and now - one.recovery.taken_at),
        "step": Column(title="Step", value=lambda one, now: one.recovery and one.recovery.step),
        "goodput": Column(title="Goodput", value=lambda one, now: one.time and one.time.goodput, falling=False),
        "lost": Column(title="Lost", value=lambda one, now: one.time and sum(one.time.lost_seconds.values())),
        "kept": Column(title="Kept just in time", value=lambda one, now: one.time and one.time.kept_seconds),
        "stored": Column(title="Stored", value=lambda one, now: one.stored_bytes),
        "sign": Column(title="Last sign", value=lambda one, now: one.sign_at),
    }
)
"""The columns by the word that an address has for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A run as a page shows it. `standing` is None until it was read."""

    run: KnownRun
    standing: RunStanding | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunQuery:
    """What an address asks for. Words that mean nothing count as not given."""

    search: str = ""
    state: str = ""
    sort: str = "run"
    falling: bool = False
    page: int = 1

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Self:
        sort = given.get("sort", "")
        sort = sort if sort in COLUMNS else "run"
        order = given.get("order", "")
        page = given.get("page", "")
        return cls(
            search=given.get("q", "")[:_MOST_SEARCH_CHARACTERS],
            state=state if (state := given.get("state", "")) in list(RunStanding) else "",
            sort=sort,
            falling=order == "falling" if order in ("falling", "rising") else COLUMNS[sort].falling,
            page=int(page) if page.isascii() and page.isdecimal() and 0 < len(page) < 7 and int(page) else 1,
        )

    def address(self, **changes: Any) -> str:
        """Return the address of this page with other values, without those that are the default."""
        asked = replace(self, **changes)
        words = {"q": asked.search, "state": asked.state}
        if (asked.sort, asked.falling) != ("run", False):
            words |= {"sort": asked.sort, "order": "falling" if asked.falling else "rising"}
        words |= {"page": str(asked.page)} if asked.page > 1 else {}
        given = {name: value for name, value in words.items() if value}
        return f"/?{urlencode(given, errors='replace')}" if given else "/"

    def sorted_by(self, column: str) -> str:
        """Return the address that a column's heading leads to: its other order if it is the one that sorts now."""
        falling = not self.falling if column == self.sort else COLUMNS[column].falling
        return self.address(sort=column, falling=falling, page=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """The figures of several runs. `cause` is the one that has cost most; empty if nothing was lost."""

    wall_seconds: float
    productive_seconds: float
    lost_seconds: float
    cause: str
    kept_seconds: float

    @property
    def goodput(self) -> float:
        return self.productive_seconds / self.wall_seconds if self.wall_seconds else 0.0

    @classmethod
    def of(cls, times: Sequence[RunTime]) -> Self:
        lost: Counter[str] = Counter()
        for time in times:
            lost.update(time.lost_seconds)
        cause, seconds = max(lost.items(), key=lambda one: one[1])
        return cls(
            wall_seconds=sum(time.wall_seconds for time in times),
            productive_seconds=sum(time.productive_seconds for time in times),
            lost_seconds=sum(lost.values()),
            cause=cause if seconds else "",
            kept_seconds=sum(time.kept_seconds for time in times),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    """One page of what was asked for. `found` counts all pages; `counts` all runs by how they stand.

    `oldest` is the running run whose recovery point is the oldest. `together` is None without a ledger. Both are of all
    that was found.
    """

    rows: tuple[RunRow, ...]
    oldest: RunRow | None
    together: Together | None
    found: int
    page: int
    pages: int
    counts: Mapping[str, int]


def page_of(runs: Iterable[KnownRun], query: RunQuery, *, now: float, abandoned_after_seconds: float) -> RunPage:
    rows = [
        RunRow(run=run, standing=run.overview.standing(now, abandoned_after_seconds) if run.overview else None)
        for run in runs
    ]
    counts = {state.value: sum(row.standing is state for row in rows) for state in RunStanding}
    wanted = query.search.casefold()
    found = [
        row for row in rows if wanted in row.run.name.casefold() and (not query.state or row.standing == query.state)
    ]
    ordered = _sorted(found, query, now)
    pages = max(1, -(-len(ordered) // ROWS))
    page = min(query.page, pages)
    shown = tuple(ordered[(page - 1) * ROWS : page * ROWS])
    running = [row for row in found if row.standing is RunStanding.RUNNING and _taken_at(row)]
    times = [row.run.overview.time for row in found if row.run.overview and row.run.overview.time]
    return RunPage(
        rows=shown,
        oldest=min(running, key=_taken_at, default=None),
        together=Together.of(times) if times else None,
        found=len(ordered),
        page=page,
        pages=pages,
        counts=counts,
    )


def _taken_at(row: RunRow) -> float:
    """Return when the recovery point was taken; 0 if there is none."""
    return row.run.overview.recovery.taken_at if row.run.overview and row.run.overview.recovery else 0.0


def _sorted(rows: list[RunRow], query: RunQuery, now: float) -> list[RunRow]:
    def value(row: RunRow) -> Any:
        match query.sort:
            case "run":
                return row.run.name
            case "state":
                return None if row.standing is None else list(RunStanding).index(row.standing)
            case _:
                return row.run.overview and COLUMNS[query.sort].value(row.run.overview, now)

    named = sorted(rows, key=lambda row: row.run.name)
    known = sorted([row for row in named if value(row) is not None], key=value, reverse=query.falling)
    return known + [row for row in named if value(row) is None]
