"""Commands for a destination: ls, verify, prune and doctor. Owns their arguments and output."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import click

from keepstep_agent.catalog import pruning
from keepstep_agent.catalog.damage import clear_damage, damaged_saves, read_damage
from keepstep_agent.catalog.deep_check import check
from keepstep_agent.catalog.markers import (
    has_marker,
    list_committed,
    list_snapshots,
    list_step,
    list_weights_alone,
    read_marker,
    saved_at,
)
from keepstep_agent.catalog.object_reads import DAMAGE, for_each
from keepstep_agent.catalog.reading import Problem
from keepstep_agent.cli.formatting import errors_reported, progress_line, table
from keepstep_agent.cli.store_options import destination_options
from keepstep_agent.cli.store_work import as_json_option, opened, print_json, run_work
from keepstep_agent.core.errors import ErrorKind, StoreError, printable
from keepstep_agent.core.model import CommitMarker
from keepstep_agent.core.policies.restore_choice import CommittedSave, by_line, newest_first
from keepstep_agent.core.quantities import amount
from keepstep_agent.core.settings.values import RetentionSettings, Settings, StoreSettings, TransferSettings
from keepstep_agent.ports import StoreReader

_MARKERS_AT_ONCE: Final = 8
_NAME_WIDTH: Final = len("checkpoint-123456")
_SAVE_WIDTH: Final = 9
"""A save's id wraps after the hyphen in its middle."""
_REASON_WIDTH: Final = 30


@click.command()
@destination_options()
@click.option("--newest", type=click.IntRange(min=1), default=20, show_default=True, help="List so many of each.")
@click.option("--all", "everything", is_flag=True, help="List all of them, which reads a marker of each.")
@as_json_option
def ls(settings: Settings, newest: int, everything: bool, as_json: bool) -> None:
    """List the committed checkpoints at DEST, newest first.

    Then the snapshots of output directories, node by node.
    """
    checkpoints, snapshots, older = run_work(settings, _ls(settings.store, None if everything else newest))
    rows = [*checkpoints, *snapshots]
    if as_json:
        print_json(
            {
                "destination": settings.store.destination,
                "checkpoints": checkpoints,
                "snapshots": snapshots,
                "older_exist": older,
            }
        )
    else:
        cells = [("STEP", "NAME", "KIND", "RANKS", "SIZE", "SAVED (UTC)", "SAVE")]
        cells += [
            (
                str(row.get("step", "")),
                _path(row),
                _kind(row),
                str(row.get("world_size", "")),
                amount(row["size_bytes"]) if "size_bytes" in row else "",
                _moment(row["saved_at"]) if "saved_at" in row else "damaged",
                row["save"],
            )
            for row in rows
        ]
        lines = table(cells, right=(0, 3, 4), folded={6: _SAVE_WIDTH, 1: _NAME_WIDTH})
        click.echo("\n".join(lines) if rows else "no committed checkpoint")
        if older:
            click.echo(f"older ones are not listed: raise --newest, which is {newest}, or add --all")
        for row in rows:
            if row["problem"]:
                what = f"snapshot {row['number']} of {row['series']}" if "series" in row else f"step {row['step']}"
                click.echo(f"{what}: {printable(row['problem'])}")
    _exit_with_problem(any(row["problem"] for row in rows))


@click.command()
@destination_options()
@click.option("--step", type=click.IntRange(min=0), help="Verify this step instead of the newest.")
@click.option("--all", "everything", is_flag=True, help="Verify every committed checkpoint and snapshot.")
@as_json_option
def verify(settings: Settings, step: int | None, everything: bool, as_json: bool) -> None:
    """Read back checkpoints at DEST and name what is damaged.

    Compares every byte with the checksum of what was written. A checkpoint that is deleted meanwhile is not damaged.
    Without an option these are the newest checkpoint of each output directory and the newest snapshot of each node.
    """
    if everything and step is not None:
        raise click.UsageError("give --step or --all, not both")
    found = run_work(settings, _verify(settings.store, step, everything))
    if as_json:
        rows = [
            {
                **_identity(committed),
                "deleted": problems is None,
                "problems": [{"object": problem.key, "problem": problem.what} for problem in problems or ()],
            }
            for committed, problems in found
        ]
        print_json(
            {
                "destination": settings.store.destination,
                "checkpoints": [row for row in rows if "step" in row],
                "snapshots": [row for row in rows if "series" in row],
            }
        )
    else:
        for committed, problems in found:
            if problems is None:
                verdict = "deleted since it was listed"
            else:
                verdict = f"{len(problems)} problems" if problems else "every byte is as it was written"
            click.echo(f"{_title(committed)} (save {committed.save}): {verdict}")
            for problem in problems or ():
                click.echo(f"  {printable(str(problem))}")
    _exit_with_problem(any(problems for _, problems in found))


@click.command()
@destination_options(*(f"retention.{field.name}" for field in fields(RetentionSettings)))
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted, which is the default.")
@click.option("--yes", is_flag=True, help="Delete.")
@as_json_option
def prune(settings: Settings, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Show what is no longer wanted at DEST; delete it with --yes.

    Without --yes nothing is deleted: you see what would be, and why everything else stays.

    A checkpoint stays if any of the options wants it. Also deletes saves that never committed. A committed checkpoint
    is deleted only if --keep-last newer ones are complete; the newest and the one committed last always stay. A
    checkpoint does not count as newer if restore found it damaged, or if it was committed before one of a lower step.
    The snapshots of each node are judged by themselves. --weights-only-after drops the optimizer's files of what stays
    but is old.
    """
    if dry_run and yes:
        raise click.UsageError("give --dry-run or --yes, not both: without --yes nothing is deleted anyway")
    report = run_work(settings, _prune(settings, dry_run=not yes))
    plan = report.plan
    if as_json:
        print_json(
            {
                "destination": settings.store.destination,
                "dry_run": not yes,
                "refused": plan.refused,
                "deleted": [
                    {
                        "name": one.name,
                        "save": one.save,
                        "committed": one.committed,
                        "size_bytes": one.size_bytes,
                        "reason": one.reason,
                        "objects": [key for wave in one.waves for key in wave],
                    }
                    for one in plan.deletions
                ],
                "weights_only": [
                    {
                        "name": one.name,
                        "save": one.committed.save,
                        "size_bytes": one.size_bytes,
                        "objects": list(one.keys),
                    }
                    for one in report.reductions
                ],
                "kept": [asdict(one) for one in plan.kept],
                "aborted_uploads": list(report.aborted_uploads),
                "litter": list(report.litter),
                "ledger_objects": report.ledger_objects,
            }
        )
    elif plan.refused:
        click.echo(f"error: nothing was deleted: {printable(plan.refused)}", err=True)
    else:
        verb = "deleted" if yes else "would be deleted"
        cells = [(one.name, one.save, verb, amount(one.size_bytes), one.reason) for one in plan.deletions]
        reduced = {one.committed.save: one.size_bytes for one in report.reductions}
        weights = "weights only" if yes else "would be weights only"
        cells += [
            (one.name, one.save, weights, amount(reduced[one.save]), one.reason)
            if one.save in reduced
            else (one.name, one.save, "kept", "", one.reason)
            for one in plan.kept
        ]
        heads = ("NAME", "SAVE", "", "SIZE", "WHY")
        lines = table([heads, *cells], right=(3,), folded={4: _REASON_WIDTH, 1: _SAVE_WIDTH, 0: _NAME_WIDTH})
        click.echo("\n".join(lines) if cells else "the destination has no saves")
        dropped = f", {len(reduced)} lose their optimizer's files" if reduced else ""
        click.echo(
            f"{len(plan.deletions)} saves {verb}{dropped}, {amount(report.freed_bytes)}; "
            f"{len(report.aborted_uploads)} unfinished uploads {verb.replace('deleted', 'aborted')}, "
            f"{len(report.litter)} leftovers {verb}"
        )
        if report.ledger_objects:
            click.echo(f"{report.ledger_objects} objects of the ledger {verb.replace('deleted', 'merged')} into others")
        if not yes:
            click.echo("nothing was deleted: add --yes to delete")
    _exit_with_problem(bool(plan.refused))


async def _ls(settings: StoreSettings, newest: int | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]], bool]:
    """Return the rows of the announced checkpoints, those of the snapshots, and whether there are older ones.

    `newest`: how many of the checkpoints and of each node's snapshots; None: all.
    """
    async with opened(settings) as store:
        groups = [*by_line(await _announced(store)).values(), *(await list_snapshots(store)).values()]
        older = newest is not None and any(len(group) > newest for group in groups)
        listed = [one for group in groups for one in group[:newest]]
        committed, snapshots = ([one for one in listed if bool(one.series) is wanted] for wanted in (False, True))
        answers: dict[str, CommitMarker | str] = {}
        damaged = dict.fromkeys(await damaged_saves(store), "")

        async def read(one: CommittedSave) -> None:
            try:
                answers[one.key] = await read_marker(store, one)
                if one.save in damaged:
                    damaged[one.save] = await read_damage(store, one.save)
            except StoreError as error:
                if error.kind not in (*DAMAGE, ErrorKind.FORMAT_UNKNOWN):
                    raise
                if await has_marker(store, one):
                    answers[one.key] = str(error)

        await for_each((*committed, *snapshots), read, at_once=_MARKERS_AT_ONCE)
        checkpoints, snapshot_rows = (
            [_row(one, answers[one.key], damaged.get(one.save)) for one in listed if one.key in answers]
            for listed in (committed, snapshots)
        )
        return checkpoints, snapshot_rows, older


async def _announced(store: StoreReader) -> Sequence[CommittedSave]:
    """Return the checkpoints, newest first, and among them those of which only the weights are left."""
    committed = await list_committed(store)
    return newest_first([*committed, *await list_weights_alone(store, committed)])


def _row(committed: CommittedSave, answer: CommitMarker | str, damage: str | None) -> dict[str, Any]:
    """Return what `ls` says of a save. `damage`: what a restore found wrong; None if none did."""
    row = _identity(committed)
    if isinstance(answer, str):
        return {**row, "problem": answer}
    if not committed.series:
        info = answer.info
        row |= {"name": info.name, "directory": info.directory, "kind": info.kind.value, "world_size": info.world_size}
    return {
        **row,
        "file_count": answer.left_files,
        "size_bytes": answer.left_bytes,
        "saved_at": answer.saved_at,
        "problem": "" if damage is None else f"a restore did not take it: {damage or 'it did not say why'}",
    }


def _path(row: dict[str, Any]) -> str:
    name = str(row.get("name") or row.get("series", ""))
    return f"{row['directory']}/{name}" if row.get("directory") else name


def _kind(row: dict[str, Any]) -> str:
    if "series" in row:
        return "snapshot"
    return "weights only" if row["weights_only"] else str(row.get("kind", ""))


def _identity(committed: CommittedSave) -> dict[str, Any]:
    """Return what says in JSON which checkpoint or snapshot it is."""
    if committed.series:
        return {"series": committed.series, "number": committed.step, "save": committed.save}
    return {"step": committed.step, "save": committed.save, "weights_only": committed.weights_only}


def _title(committed: CommittedSave) -> str:
    if committed.series:
        return f"snapshot {committed.series} {_moment(committed.saved_at or committed.modified_at)}"
    return f"step {committed.step}{', weights only' if committed.weights_only else ''}"


async def _verify(
    settings: StoreSettings, step: int | None, everything: bool
) -> list[tuple[CommittedSave, Sequence[Problem] | None]]:
    """Return each checkpoint with its problems; None if it was deleted meanwhile."""
    async with opened(settings) as store:
        chosen = await _chosen(store, step, everything)
        if not chosen:
            what = "no committed checkpoint" if step is None else f"no committed checkpoint of step {step}"
            raise StoreError(
                ErrorKind.NO_CHECKPOINT,
                f"{settings.destination} has {what}",
                hint="`keepstep ls` lists the checkpoints",
            )
        found: list[tuple[CommittedSave, Sequence[Problem] | None]] = []
        for one in chosen:
            problems: Sequence[Problem]
            try:
                with progress_line() as advance:
                    problems = await check(
                        store,
                        one,
                        concurrency=TransferSettings().max_concurrency,
                        on_progress=partial(advance, _title(one)),
                    )
            except StoreError as error:
                if error.kind is not ErrorKind.FORMAT_UNKNOWN:
                    raise
                problems = [Problem(key=one.key, what=str(error).removeprefix(f"{one.key} "))]
            if not problems:
                await clear_damage(store, one.save)
            deleted = bool(problems) and not await has_marker(store, one)
            found.append((one, None if deleted else problems))
        return found


async def _chosen(store: StoreReader, step: int | None, everything: bool) -> list[CommittedSave]:
    """Return what to verify: a step, or the newest or all of each output directory and of each node's snapshots.

    Where only the weights are left, they are verified too, unless the newest is asked for.
    """
    if step is not None:
        found = await list_step(store, step)
        return [*found, *await list_weights_alone(store, found, step=step)]
    committed = await (_announced(store) if everything else list_committed(store))
    groups = [*by_line(committed).values(), *(await list_snapshots(store)).values()]
    return [
        replace(one, saved_at=await saved_at(store, one)) if one.series else one
        for group in groups
        for one in (group if everything else group[:1])
    ]


async def _prune(settings: Settings, *, dry_run: bool) -> pruning.PruneReport:
    async with opened(settings.store) as store:
        return await pruning.prune(store, settings.retention, now=time.time(), dry_run=dry_run)


def _moment(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _exit_with_problem(problem: bool) -> None:
    if problem:
        raise SystemExit(1)


_MARKS: Final = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}


@click.command()
@destination_options()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(settings: Settings, as_json: bool) -> None:
    """Examine a destination, and leave nothing behind there.

    Checks access, conditional writes, checksums, the clock, and the speed of uploads and downloads. Warns if the bucket
    keeps unfinished uploads or old versions for ever.
    """
    with errors_reported():
        failed = asyncio.run(_examine(settings, as_json))
    raise SystemExit(1 if failed else 0)


async def _examine(settings: Settings, as_json: bool) -> bool:
    from keepstep_agent.doctor import examine

    findings = []
    async for finding in examine(settings.store):
        findings.append(finding)
        if not as_json:
            mark, colour = _MARKS[finding.verdict]
            rows = [(mark, f"{finding.name}: {finding.detail}"), *([("", finding.hint)] if finding.hint else [])]
            for line in table(rows, folded={1: _REASON_WIDTH}):
                click.echo(click.style(line[: len(mark)], fg=colour) + line[len(mark) :])
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings]))
    return any(finding.verdict == "fail" for finding in findings)
