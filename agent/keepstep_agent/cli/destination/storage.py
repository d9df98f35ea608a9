"""The command du: what takes the room below a prefix of many runs. Owns its arguments and output."""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

import click

from keepstep_agent.catalog.usage import StorageUse, storage_use
from keepstep_agent.cli.formatting import table
from keepstep_agent.cli.quantities import duration, price_option
from keepstep_agent.cli.store_options import destination_options
from keepstep_agent.cli.store_work import as_json_option, opened, print_json, run_work
from keepstep_agent.core.errors import printable
from keepstep_agent.core.policies.storage_use import (
    COMMITTED_CHECKPOINTS,
    UPLOADS,
    Age,
    AgeLimits,
    Amount,
    RunUse,
    Usage,
    UseKind,
)
from keepstep_agent.core.quantities import age, amount
from keepstep_agent.core.settings.values import GIB, RetentionSettings, Settings, StoreSettings

_RUN_WIDTH: Final = 12
_UNREAD_SHOWN: Final = 3
_OWN_PREFIX: Final = "."
"""How DEST itself is shown among runs, which are relative to it."""
_COST: Final = "A MONTH"
_COLUMNS: Final = (COMMITTED_CHECKPOINTS, (UseKind.SNAPSHOT,), (UseKind.LEFTOVER,), UPLOADS)
_YOUNGER: Final = {
    Age.DAY: "less than a day",
    Age.WEEK: "less than 7 days",
    Age.MONTH: "less than 30 days",
    Age.QUARTER: "less than 90 days",
    Age.OLDER: "older",
}

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@click.command()
@destination_options()
@click.option(
    "--abandoned-after",
    metavar="DURATION",
    callback=duration,
    default="7d",
    show_default=True,
    help="A run that has committed nothing for so long, and has no final checkpoint, is abandoned.",
)
@click.option(
    "--orphaned-after",
    metavar="DURATION",
    callback=duration,
    default=f"{RetentionSettings().orphan_age_seconds:g}s",
    show_default=True,
    help="An uncommitted save is a leftover, and an unfinished upload orphaned, after so long.",
)
@click.option(
    "--kinds",
    "every_kind",
    is_flag=True,
    help="Tell periodic, just-in-time and final checkpoints apart: reads all markers.",
)
@price_option
@as_json_option
def du(
    settings: Settings,
    abandoned_after: float,
    orphaned_after: float,
    every_kind: bool,
    price_per_gib_month: float | None,
    as_json: bool,
) -> None:
    """Show what takes the room at DEST, by run, kind and age.

    DEST may hold many runs.

    Also shows unfinished multipart uploads, which take room and which no listing shows, and which runs are complete,
    active or abandoned. Lists DEST once and reads one marker of each run. Does not count old versions of objects.
    Writes nothing.
    """
    limits = AgeLimits(
        now=time.time(),
        abandoned_after_seconds=abandoned_after,
        orphan_age_seconds=orphaned_after,
    )
    found = run_work(settings, _use(settings.store, limits, every_kind))
    if as_json:
        print_json({"destination": settings.store.destination, **_as_json(found, price_per_gib_month)})
        return
    for line in _lines(found, price_per_gib_month, limits.now):
        click.echo(line)


async def _use(settings: StoreSettings, limits: AgeLimits, every_kind: bool) -> StorageUse:
    async with opened(settings) as store:
        return await storage_use(store, limits, every_kind=every_kind)


def _as_json(found: StorageUse, price: float | None) -> dict[str, Any]:
    return {
        "runs": [
            {
                "run": one.prefix.removesuffix("/") or _OWN_PREFIX,
                "state": one.state.value,
                "step": one.step,
                "committed_at": one.committed_at,
                **_usage_as_json(one.usage, price),
            }
            for one in found.runs
        ],
        "outside_of_runs": _usage_as_json(found.outside, price),
        "total": _usage_as_json(found.total, price),
        "unsized_uploads": found.unsized_uploads,
        "uploads_unknown": found.uploads_unknown,
        "unread_markers": list(found.unread),
    }


def _usage_as_json(usage: Usage, price: float | None) -> dict[str, Any]:
    cost = {} if price is None else {"cost_per_month": round(_cost(usage.size_bytes, price), 6)}
    return {
        "size_bytes": usage.size_bytes,
        **cost,
        "kinds": {
            kind.value: {"count": one.count, "size_bytes": one.size_bytes}
            for kind, one in _present(UseKind, usage.kinds)
        },
        "ages": {age.value: size_bytes for age, size_bytes in _present(Age, usage.ages)},
    }


def _present(order: Iterable[_Key], values: Mapping[_Key, _Value]) -> list[tuple[_Key, _Value]]:
    return [(one, values[one]) for one in order if one in values]


def _cost(size_bytes: int, price: float) -> float:
    return size_bytes / GIB * price


def _lines(found: StorageUse, price: float | None, now: float) -> Iterator[str]:
    if found.runs:
        yield from _runs_table(found.runs, price, now)
        yield ""
    else:
        yield "no run"
    total = found.total
    kinds = [(kind.value, str(one.count), one.size_bytes) for kind, one in _present(UseKind, total.kinds)]
    yield from _sizes_table(("KIND", "COUNT"), [*kinds, ("all", "", total.size_bytes)], price)
    yield ""
    ages = [(_YOUNGER[age], "", size_bytes) for age, size_bytes in _present(Age, total.ages)]
    yield from _sizes_table(("AGE", ""), ages, price)
    if found.unsized_uploads:
        yield f"the store does not say how large {found.unsized_uploads} of the unfinished uploads are"
    if found.uploads_unknown:
        yield f"unfinished uploads are not known: {printable(found.uploads_unknown)}"
    if found.unread:
        shown = ", ".join(map(printable, found.unread[:_UNREAD_SHOWN]))
        yield f"{len(found.unread)} commit markers cannot be read, `keepstep verify` says why: {shown}"


def _runs_table(runs: Iterable[RunUse], price: float | None, now: float) -> Iterator[str]:
    header = ["RUN", "STATE", "STEP", "COMMITTED", "CHECKPOINTS", "SNAPSHOTS", "LEFTOVERS", "UPLOADS", "OTHER", "SIZE"]
    rows = [[*header, *([] if price is None else [_COST])]]
    for one in sorted(runs, key=lambda one: (-one.usage.size_bytes, one.prefix)):
        usage = one.usage
        columns = [usage.amount_of(kinds) for kinds in _COLUMNS]
        other_bytes = usage.size_bytes - sum(column.size_bytes for column in columns)
        rows.append(
            [
                one.prefix.removesuffix("/") or _OWN_PREFIX,
                one.state.value,
                "" if one.step is None else str(one.step),
                "never" if one.committed_at is None else f"{age(max(0.0, now - one.committed_at))} ago",
                *(f"{column.count}, {amount(column.size_bytes)}" if column != Amount() else "" for column in columns),
                amount(other_bytes) if other_bytes else "",
                amount(usage.size_bytes),
                *_cost_cells(usage.size_bytes, price),
            ]
        )
    return table(rows, right=range(2, len(rows[0])), folded={0: _RUN_WIDTH})


def _sizes_table(header: tuple[str, str], rows: Iterable[tuple[str, str, int]], price: float | None) -> Iterator[str]:
    cells = [[*header, "SIZE", *([] if price is None else [_COST])]]
    cells += [[name, count, amount(size_bytes), *_cost_cells(size_bytes, price)] for name, count, size_bytes in rows]
    return table(cells, right=range(1, len(cells[0])), folded={})


def _cost_cells(size_bytes: int, price: float | None) -> list[str]:
    return [] if price is None else [f"{_cost(size_bytes, price):,.2f}"]
