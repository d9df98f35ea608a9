"""Commands that watch or steer a running agent: status and save."""

import json
import time
from collections.abc import Iterator
from typing import Any, Final

import click
from google.protobuf.message import Message

from keepstep_agent.cli.agent_call import CALL_TIMEOUT_SECONDS, agent_stub
from keepstep_agent.cli.agent_options import agent_options
from keepstep_agent.cli.formatting import errors_reported, table
from keepstep_agent.core.errors import printable
from keepstep_agent.core.quantities import age, amount
from keepstep_api.v1 import agent_pb2

_NAME_WIDTH: Final = 20
_REASON_WIDTH: Final = 20


@click.command()
@agent_options
@click.option("--follow", "-f", is_flag=True, help="Keep running and print every change.")
@click.option("--json", "as_json", is_flag=True, help="Print the status as JSON; one line each with --follow.")
def status(socket: str, follow: bool, as_json: bool) -> None:
    """Show what the agent knows and does.

    Prints the recovery point, the backlog, and how far each checkpoint is.
    """
    with errors_reported(), agent_stub(socket) as stub:
        if not follow:
            _show(stub.GetStatus(agent_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_SECONDS), as_json)
            return
        updates = stub.WatchStatus(agent_pb2.WatchStatusRequest())
        try:
            for update in updates:
                if not as_json:
                    click.clear()
                _show(update, as_json)
        except KeyboardInterrupt:
            return


@click.command()
@agent_options
@click.option("--reason", default="keepstep save", help="Who asks and why; appears in the log.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
def save(socket: str, reason: str, as_json: bool) -> None:
    """Ask the running trainers to save now, and to go on.

    They save at their next step. Exits with 1 if no trainer is running.
    """
    with errors_reported(), agent_stub(socket) as stub:
        answer = stub.RequestSave(agent_pb2.RequestSaveRequest(reason=reason), timeout=CALL_TIMEOUT_SECONDS)
    if as_json:
        click.echo(json.dumps({"ranks": answer.ranks}))
    elif answer.ranks:
        click.echo(f"asked {answer.ranks} local rank{'s' if answer.ranks > 1 else ''} to save")
    else:
        click.echo("asked nobody to save: the agent knows no live rank", err=True)
    if not answer.ranks:
        raise SystemExit(1)


def _show(update: agent_pb2.Status, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(_values(update)))
    else:
        click.echo("\n".join(_picture(update)))


def _values(message: Message) -> dict[str, Any]:
    """Convert a message for JSON: numbers stay numbers, and enum values get our names. Protobuf's JSON does neither."""
    return {
        field.name: _value(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return [_values(one) for one in value] if field.is_repeated else _values(value)
    if field.enum_type is not None:
        return _word(field.enum_type.values_by_number[value].name)
    return list(value) if field.is_repeated else value


def _word(name: str) -> str:
    """Turn `KIND_JUST_IN_TIME` into `just-in-time`."""
    return name.partition("_")[2].lower().replace("_", "-")


def _picture(update: agent_pb2.Status) -> Iterator[str]:
    ranks = "1 live rank" if update.live_ranks == 1 else f"{update.live_ranks} live ranks"
    yield f"agent {update.agent_version} to {printable(update.destination)}, {ranks}"
    if update.HasField("newest_committed"):
        newest = update.newest_committed
        old = age(update.recovery_point_age_seconds)
        yield f"recovery point: step {newest.step} ({printable(newest.name)}), {old} old"
    elif update.HasField("newest_snapshot"):
        yield f"recovery point: a snapshot of the output directory, {age(update.recovery_point_age_seconds)} old"
    else:
        yield click.style("recovery point: none yet; a crash now would lose all work", fg="yellow")
    if update.HasField("objective"):
        yield from _objective(update.objective)
    if update.HasField("progress"):
        yield _progress(update.progress)
    rate = (
        f"{amount(update.upload_rate_bytes_per_second)}/s"
        if update.upload_rate_bytes_per_second
        else "not measured yet"
    )
    drain = age(update.drain_seconds) if update.drain_seconds >= 0 else "unknown"
    yield f"backlog: {amount(update.backlog_bytes)}, upload rate {rate}, drain in {drain}"
    if update.terminating:
        left = f"{max(0.0, update.deadline - time.time()):.0f} s left" if update.deadline else "no time limit"
        yield click.style(f"terminating: {left}", fg="red", bold=True)
    if update.HasField("fetching"):
        fetching = update.fetching
        how_far = (
            f"{amount(fetching.done_bytes)} of {amount(fetching.total_bytes)}" if fetching.total_bytes else "begun"
        )
        trouble = f"; {printable(fetching.storage_error)}" if fetching.storage_error else ""
        yield f"restoring step {fetching.step}: {how_far}{trouble}"
    if update.storage_error:
        yield click.style(f"storage: {printable(update.storage_error)}", fg="red")
    for line in update.set_aside:
        yield click.style(printable(line), fg="yellow")
    for line in update.not_stored:
        yield click.style(f"not stored: {printable(line)}", fg="yellow")
    if update.checkpoints:
        rows = [("step", "checkpoint", "kind", "phase", "size", "durable", ""), *map(_row, update.checkpoints)]
        yield from table(rows, right=(0, 4, 5), folded={6: _REASON_WIDTH, 1: _NAME_WIDTH})


def _progress(progress: agent_pb2.Progress) -> str:
    old = age(progress.age_seconds)
    if progress.stuck:
        return click.style(f"trainer: stuck at step {progress.step} for {old}", fg="red", bold=True)
    rate = f", {progress.steps_per_second:.3g} steps/s" if progress.steps_per_second else ""
    return f"trainer: step {progress.step} {old} ago{rate}"


def _objective(objective: agent_pb2.Objective) -> Iterator[str]:
    wanted, interval = age(objective.recovery_point_seconds), age(objective.interval_seconds)
    yield f"objective: at most {wanted} old; a save every {interval}"
    if objective.obstacle:
        reached = age(objective.reached_seconds)
        yield click.style(f"not kept, it gets {reached} old: {printable(objective.obstacle)}", fg="yellow")


def _row(checkpoint: agent_pb2.Checkpoint) -> tuple[str, ...]:
    durable = 100 * checkpoint.durable_bytes // checkpoint.size_bytes if checkpoint.size_bytes else 100
    return (
        "" if checkpoint.kind == agent_pb2.KIND_SNAPSHOT else str(checkpoint.step),
        checkpoint.name,
        _word(agent_pb2.Kind.Name(checkpoint.kind)),
        _word(agent_pb2.Phase.Name(checkpoint.phase)),
        amount(checkpoint.size_bytes),
        f"{durable} %",
        checkpoint.reason,
    )
