"""Commands for a destination: ls, verify, prune and doctor. Owns their arguments and output."""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from mooring_agent import catalog
from mooring_agent.catalog.object_reads import for_each
from mooring_agent.catalog.pruning import clear_damage
from mooring_agent.catalog.reading import DAMAGE
from mooring_agent.cli.formatting import amount, errors_reported
from mooring_agent.cli.store_options import store_options
from mooring_agent.cli.store_work import as_json_option, opened, print_json, progress_bar, run_work
from mooring_agent.core.errors import ErrorKind, StoreError, printable
from mooring_agent.core.model import CommitMarker
from mooring_agent.core.policies.restore_choice import CommittedSave
from mooring_agent.core.settings.table import environment_variable
from mooring_agent.core.settings.values import RetentionSettings, StoreSettings, TransferSettings

_MARKERS_AT_ONCE: Final = 8
_PIPED_WIDTH: Final = 1000
_NAME_WIDTH: Final = len("checkpoint-123456")
_SAVE_WIDTH: Final = 9
"""A save's id wraps after the hyphen in its middle."""


@click.command()
@store_options
@as_json_option
def ls(store_settings: StoreSettings, as_json: bool) -> None:
    """List the committed checkpoints at DEST, newest first."""
    rows = run_work(_ls(store_settings))
    if as_json:
        print_json({"destination": store_settings.destination, "checkpoints": rows})
    else:
        # In a narrow terminal, names and ids wrap; they are never truncated.
        table = Table(
            Column("STEP", justify="right", no_wrap=True),
            Column("NAME", overflow="fold", min_width=_NAME_WIDTH),
            Column("KIND", no_wrap=True),
            Column("RANKS", justify="right", no_wrap=True),
            Column("SIZE", justify="right", no_wrap=True),
            Column("SAVED (UTC)", no_wrap=True),
            Column("SAVE", overflow="fold", min_width=_SAVE_WIDTH),
        )
        for row in rows:
            _add_row(
                table,
                str(row["step"]),
                row.get("name", ""),
                row.get("kind", ""),
                str(row.get("world_size", "")),
                amount(row["size_bytes"]) if "size_bytes" in row else "",
                _moment(row["saved_at"]) if "saved_at" in row else "damaged",
                row["save"],
            )
        _print_table(table, empty="no committed checkpoint")
        for row in rows:
            if row["problem"]:
                click.echo(f"step {row['step']}: {printable(row['problem'])}")
    _exit_with_problem(any(row["problem"] for row in rows))


@click.command()
@store_options
@click.option("--step", type=click.IntRange(min=0), help="Verify this step instead of the newest.")
@click.option("--all", "everything", is_flag=True, help="Verify every committed checkpoint.")
@as_json_option
def verify(store_settings: StoreSettings, step: int | None, everything: bool, as_json: bool) -> None:
    """Read back checkpoints at DEST and name what is damaged.

    Compares every byte with the checksum of what was written. A checkpoint that is deleted meanwhile is not damaged.
    """
    if everything and step is not None:
        raise click.UsageError("give --step or --all, not both")
    found = run_work(_verify(store_settings, step, everything))
    if as_json:
        checkpoints = [
            {
                "step": committed.step,
                "save": committed.save,
                "deleted": problems is None,
                "problems": [{"object": problem.key, "problem": problem.what} for problem in problems or ()],
            }
            for committed, problems in found
        ]
        print_json({"destination": store_settings.destination, "checkpoints": checkpoints})
    else:
        for committed, problems in found:
            if problems is None:
                verdict = "deleted since it was listed"
            else:
                verdict = f"{len(problems)} problems" if problems else "every byte is as it was written"
            click.echo(f"step {committed.step} (save {committed.save}): {verdict}")
            for problem in problems or ():
                click.echo(f"  {printable(str(problem))}")
    _exit_with_problem(any(problems for _, problems in found))


@click.command()
@store_options
@click.option("--dry-run", is_flag=True, help="Print what would be deleted, and delete nothing.")
@click.option("--yes", is_flag=True, help="Delete.")
@click.option(
    "--keep-last",
    type=click.IntRange(min=0),
    default=0,
    envvar=environment_variable("retention.keep_last"),
    help="Keep this many newest committed checkpoints; 0: all.",
)
@click.option(
    "--keep-every",
    type=click.IntRange(min=0),
    default=0,
    envvar=environment_variable("retention.keep_every_steps"),
    help="Also keep those whose step is a multiple of this; 0: none.",
)
@click.option(
    "--orphan-age-seconds",
    type=click.FloatRange(min=0),
    default=RetentionSettings().orphan_age_seconds,
    show_default=True,
    envvar=environment_variable("retention.orphan_age_seconds"),
    help="Delete saves that never committed, and other leftovers, once they are older than this.",
)
@as_json_option
def prune(
    store_settings: StoreSettings,
    dry_run: bool,
    yes: bool,
    keep_last: int,
    keep_every: int,
    orphan_age_seconds: float,
    as_json: bool,
) -> None:
    """Delete checkpoints at DEST that are no longer wanted.

    Also deletes saves that never committed. A committed checkpoint is deleted only if --keep-last newer ones are
    complete; the newest and the one committed last always stay. A checkpoint does not count as newer if restore found
    it damaged, or if it was committed before one of a lower step.
    """
    if dry_run == yes:
        raise click.UsageError("add --dry-run to see what would be deleted, or --yes to delete it")
    if keep_every and not keep_last:
        raise click.UsageError("--keep-every needs --keep-last: without it all checkpoints are kept")
    retention = RetentionSettings(
        keep_last=keep_last, keep_every_steps=keep_every, orphan_age_seconds=orphan_age_seconds
    )
    report = run_work(_prune(store_settings, retention, dry_run))
    plan = report.plan
    if as_json:
        print_json(
            {
                "destination": store_settings.destination,
                "dry_run": dry_run,
                "refused": plan.refused,
                "deleted": [
                    {
                        "save": one.save,
                        "committed": one.committed,
                        "size_bytes": one.size_bytes,
                        "reason": one.reason,
                        "objects": [key for wave in one.waves for key in wave],
                    }
                    for one in plan.deletions
                ],
                "kept": [{"save": save, "reason": reason} for save, reason in plan.kept],
                "aborted_uploads": list(report.aborted_uploads),
                "litter": list(report.litter),
            }
        )
    elif plan.refused:
        click.echo(f"error: nothing was deleted: {printable(plan.refused)}", err=True)
    else:
        table = Table("SAVE", "", "SIZE", "WHY")
        for one in plan.deletions:
            _add_row(table, one.save, "would be deleted" if dry_run else "deleted", amount(one.size_bytes), one.reason)
        for save, reason in plan.kept:
            _add_row(table, save, "kept", "", reason)
        _print_table(table, empty="the destination has no saves")
        verb = "would be deleted" if dry_run else "deleted"
        click.echo(
            f"{len(plan.deletions)} saves {verb}, {amount(report.freed_bytes)}; "
            f"{len(report.aborted_uploads)} unfinished uploads {verb.replace('deleted', 'aborted')}, "
            f"{len(report.litter)} leftovers {verb}"
        )
    _exit_with_problem(bool(plan.refused))


async def _ls(settings: StoreSettings) -> list[dict[str, Any]]:
    async with opened(settings) as store:
        committed = await catalog.list_committed(store)
        answers: dict[str, CommitMarker | str] = {}

        async def read(one: CommittedSave) -> None:
            try:
                answers[one.save] = await catalog.read_marker(store, one)
            except StoreError as error:
                if error.kind not in (*DAMAGE, ErrorKind.FORMAT_UNKNOWN):
                    raise
                if await catalog.has_marker(store, one):
                    answers[one.save] = str(error)

        await for_each(committed, read, at_once=_MARKERS_AT_ONCE)
        return [_row(one, answers[one.save]) for one in committed if one.save in answers]


def _row(committed: CommittedSave, answer: CommitMarker | str) -> dict[str, Any]:
    row: dict[str, Any] = {"step": committed.step, "save": committed.save}
    if isinstance(answer, str):
        return {**row, "problem": answer}
    return {
        **row,
        "name": answer.info.name,
        "kind": answer.info.kind.value,
        "world_size": answer.info.world_size,
        "file_count": answer.file_count,
        "size_bytes": answer.size_bytes,
        "saved_at": answer.saved_at,
        "problem": "",
    }


async def _verify(
    settings: StoreSettings, step: int | None, everything: bool
) -> list[tuple[CommittedSave, Sequence[catalog.Problem] | None]]:
    """Return each checkpoint with its problems; None if it was deleted meanwhile."""
    async with opened(settings) as store:
        committed = await catalog.list_committed(store)
        if step is not None:
            committed = tuple(one for one in committed if one.step == step)
        if not committed:
            what = "no committed checkpoint" if step is None else f"no committed checkpoint of step {step}"
            raise StoreError(
                ErrorKind.NO_CHECKPOINT, f"{settings.destination} has {what}", hint="`mooring ls` lists the checkpoints"
            )
        found: list[tuple[CommittedSave, Sequence[catalog.Problem] | None]] = []
        for one in committed if everything or step is not None else committed[:1]:
            problems: Sequence[catalog.Problem]
            try:
                with progress_bar() as advance:
                    problems = await catalog.check(
                        store,
                        one,
                        deep=True,
                        concurrency=TransferSettings().max_concurrency,
                        on_progress=partial(advance, f"step {one.step}"),
                    )
            except StoreError as error:
                if error.kind is not ErrorKind.FORMAT_UNKNOWN:
                    raise
                problems = [catalog.Problem(key=one.key, what=str(error).removeprefix(f"{one.key} "))]
            if not problems:
                await clear_damage(store, one.save)
            deleted = bool(problems) and not await catalog.has_marker(store, one)
            found.append((one, None if deleted else problems))
        return found


async def _prune(settings: StoreSettings, retention: RetentionSettings, dry_run: bool) -> catalog.PruneReport:
    async with opened(settings) as store:
        return await catalog.prune(store, retention, now=time.time(), dry_run=dry_run)


def _add_row(table: Table, *cells: str) -> None:
    """Add a row of literal text. Names are untrusted: neither the terminal nor rich's markup may interpret them."""
    table.add_row(*(Text(printable(cell)) for cell in cells))


def _print_table(table: Table, *, empty: str) -> None:
    if not table.row_count:
        click.echo(empty)
        return
    table.box, table.pad_edge, table.collapse_padding = None, False, True
    console = Console()
    if not console.is_terminal:
        # In a pipe or a file, a row stays on one line.
        console = Console(width=_PIPED_WIDTH)
    console.print(table)


def _moment(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _exit_with_problem(problem: bool) -> None:
    if problem:
        raise SystemExit(1)


_MARKS = {"ok": "[green]ok  [/]", "warn": "[yellow]warn[/]", "fail": "[red]FAIL[/]"}
_WIDE = 10_000


@click.command()
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(store_settings: StoreSettings, as_json: bool) -> None:
    """Examine a destination, and leave nothing behind there.

    Checks access, conditional writes, checksums, the clock, and the speed of uploads and downloads.
    """
    with errors_reported():
        failed = asyncio.run(_examine(store_settings, as_json))
    raise SystemExit(1 if failed else 0)


async def _examine(store_settings: StoreSettings, as_json: bool) -> bool:
    from mooring_agent.doctor import examine

    # In a file or a pipe, lines do not wrap.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
    findings = []
    async for finding in examine(store_settings):
        findings.append(finding)
        if not as_json:
            row = Table.grid(padding=(0, 2, 0, 0))
            row.add_row(_MARKS[finding.verdict], Text(f"{finding.name}: {finding.detail}"))
            if finding.hint:
                row.add_row("", Text(finding.hint, style="dim"))
            console.print(row)
    if as_json:
        fields = ("name", "verdict", "detail", "hint")
        click.echo(json.dumps([{name: getattr(finding, name) for name in fields} for finding in findings]))
    return any(finding.verdict == "fail" for finding in findings)
