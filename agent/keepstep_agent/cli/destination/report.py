"""`keepstep report`: what became of the time of a run, or of all runs below a prefix. Owns its arguments and output."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

import click

from keepstep_agent.catalog.ledger import read_ledger
from keepstep_agent.catalog.runs import FoundRuns, find_runs
from keepstep_agent.cli.formatting import table
from keepstep_agent.cli.store_options import destination_options
from keepstep_agent.cli.store_work import as_json_option, opened, print_json, run_work
from keepstep_agent.core.errors import ErrorKind, StoreError, printable
from keepstep_agent.core.policies.goodput import WHY, GoodputReport, report_goodput, together
from keepstep_agent.core.policies.run_history import run_history
from keepstep_agent.core.quantities import age
from keepstep_agent.core.settings.values import Settings, StoreSettings

_RUN_WIDTH: Final = 12


@click.command()
@destination_options()
@as_json_option
def report(settings: Settings, as_json: bool) -> None:
    """Report what became of a run's time.

    Goodput is productive time divided by wall time. The lost time has causes: restore, start, stall, redone steps,
    drain, and waiting. DEST is a run's destination, or a prefix that all runs have in common. Reads the ledger that
    agents keep at the destination.
    """
    runs, unread, walk = run_work(settings, _report(settings.store))
    if as_json:
        print_json(
            {
                "destination": settings.store.destination,
                "runs": [{"run": run or ".", **_as_json(found, run)} for run, found in runs],
                "together": _as_json(together(found for _, found in runs), None),
                "unread_objects": unread,
                "all_runs_found": walk.complete and not walk.refused,
            }
        )
        return
    if len(runs) > 1:
        click.echo("\n".join(_run_table(runs)) + "\n")
    click.echo("\n".join(_lines(together(found for _, found in runs) if len(runs) > 1 else runs[0][1])))
    if unread:
        click.echo(f"{unread} objects of the ledger cannot be read or are too many, and were left out")
    for folder in walk.refused:
        click.echo(f"the store does not let us list {printable(folder)}, whose runs are left out")
    if not walk.complete:
        click.echo("there are more folders below DEST than were looked into: name a longer prefix to see all runs")


async def _report(settings: StoreSettings) -> tuple[list[tuple[str, GoodputReport]], int, FoundRuns]:
    """Return the report of each run, how many objects could not be read, and what the walk has found."""
    async with opened(settings) as store:
        reports, unread, refusal, anything = [], 0, None, False
        walk = await find_runs(store)
        for run in walk.runs:
            # One run after the other: a ledger may have millions of entries.
            ledger = await read_ledger(store, run)
            if ledger.empty:
                continue
            reports.append((run.rstrip("/"), report_goodput(run_history(ledger.lives))))
            unread += ledger.unreadable + ledger.left_out
            refusal, anything = refusal or ledger.refusal, anything or bool(ledger.lives)
    if refusal and not anything:
        raise refusal
    if not reports:
        raise StoreError(
            ErrorKind.NOT_FOUND,
            f"{settings.destination} has no ledger",
            hint="give the destination of a run, or a prefix of several; agents keep a ledger from 0.1.0 on",
        )
    return reports, unread, walk


def _run_table(runs: list[tuple[str, GoodputReport]]) -> Iterator[str]:
    cells = [("RUN", "GOODPUT", "TIME", "STARTS", "STEPS LOST", "STEPS KEPT")]
    cells += [
        (
            run,
            f"{found.goodput:.1%}",
            age(found.wall_seconds),
            str(len(found.starts)),
            str(found.steps_lost),
            str(found.kept_steps),
        )
        for run, found in runs
    ]
    return table(cells, right=(1, 2, 3, 4, 5), folded={0: _RUN_WIDTH})


def _lines(found: GoodputReport) -> Iterator[str]:
    lasting, whole = age(found.productive_seconds), age(found.wall_seconds)
    yield f"goodput {found.goodput:.1%}: {lasting} of {whole} were work that lasts"
    cells = [("LOST", "TIME", "SHARE", "WHY")]
    cells += [
        (cause.value, age(seconds), f"{seconds / (found.wall_seconds or 1):.1%}", WHY[cause])
        for cause, seconds in found.lost_seconds.items()
    ]
    yield from table(cells, right=(1, 2), folded={3: 30})
    step = f", {found.step_seconds:.3g} s each" if found.step_seconds else ""
    yield f"{len(found.starts)} starts, {found.committed} committed checkpoints, {found.steps_lost} steps redone{step}"
    for name, done in found.units.items():
        rate = f", {done / found.wall_seconds:,.4g} a second" if found.wall_seconds else ""
        yield f"{printable(name)}: {done:,.4g} at the newest committed checkpoint{rate} of the whole time"
    if found.kept_steps:
        yield f"just-in-time saves kept {found.kept_steps} steps, {age(found.kept_seconds)} of work"


def _as_json(found: GoodputReport, run: str | None) -> dict[str, Any]:
    """Return the figures, and the same by their Prometheus names. `run` None: of all runs together."""
    values = asdict(found)
    values["lost_seconds"] = {cause.value: seconds for cause, seconds in found.lost_seconds.items()}
    label = "" if run is None else f'run="{_escaped(run or ".")}"'
    plain = {
        "keepstep_goodput_ratio": found.goodput,
        "keepstep_wall_seconds": found.wall_seconds,
        "keepstep_productive_seconds": found.productive_seconds,
        "keepstep_steps_lost": found.steps_lost,
        "keepstep_steps_kept": found.kept_steps,
        "keepstep_kept_seconds": found.kept_seconds,
    }
    metrics = {f"{name}{{{label}}}" if label else name: value for name, value in plain.items()}
    for cause, seconds in found.lost_seconds.items():
        labels = ",".join(filter(None, (label, f'cause="{cause}"')))
        metrics[f"keepstep_lost_seconds{{{labels}}}"] = seconds
    for name, done in found.units.items():
        labels = ",".join(filter(None, (label, f'unit="{_escaped(name)}"')))
        metrics[f"keepstep_units_done{{{labels}}}"] = done
    return {"goodput": found.goodput, **values, "metrics": metrics}


def _escaped(text: str) -> str:
    """Escape a label's value as Prometheus reads it."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
