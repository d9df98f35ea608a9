"""The command plan: what to set for a job, from a few numbers about it. Owns its arguments and output."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final

import click

from keepstep_agent.catalog.ledger import read_ledger
from keepstep_agent.cli.formatting import errors_reported, table
from keepstep_agent.cli.quantities import duration, parse_rate, positive, price_option, quantity
from keepstep_agent.cli.store_options import setting_option
from keepstep_agent.cli.store_work import as_json_option, opened, print_json, run_work
from keepstep_agent.config import load_some_settings
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.injection.annotation_table import OWN
from keepstep_agent.core.injection.spec import InjectionDefaults
from keepstep_agent.core.limits import WORLD_SIZE
from keepstep_agent.core.policies.measured_job import MeasuredJob, measure_job
from keepstep_agent.core.policies.run_history import run_history
from keepstep_agent.core.policies.save_advice import JobNumbers, SaveAdvice, advise
from keepstep_agent.core.quantities import age, amount
from keepstep_agent.core.settings.table import parse_bytes, parse_seconds, setting_fields, text_of
from keepstep_agent.core.settings.values import GIB, MIB, Settings, StoreSettings

_SETTINGS: Final = ("retention.keep_last", "retention.keep_every_steps", "disk.peak_factor")
_WHY_WIDTH: Final = 40
_USUAL_GRACE_SECONDS: Final = InjectionDefaults(image="").grace_seconds
"""What pods get without an annotation. A grace period is an upper bound, so no shorter one is advised."""
_MINUTES_FROM_SECONDS: Final = 1800
_NEEDED: Final = {
    "checkpoint_bytes": "--checkpoint",
    "rate_bytes_per_second": "--rate",
    "stall_seconds": "--stall",
    "mtbf_seconds": "--mtbf",
}
_CHOSEN: Final = tuple(one for one in setting_fields() if one.key in _SETTINGS)


def _with_settings(command: Any) -> Any:
    for setting in reversed(_CHOSEN):
        command = setting_option(setting)(command)
    return command


@click.command()
@click.option(
    "--ledger",
    metavar="DEST",
    help="Destination of a run whose ledger has the numbers that are not given. The environment says how to reach it.",
)
@click.option(
    "--checkpoint",
    "checkpoint_bytes",
    metavar="SIZE",
    callback=quantity(positive(parse_bytes)),
    help="Size of a whole checkpoint, such as 200Gi.",
)
@click.option(
    "--rate",
    "rate_bytes_per_second",
    metavar="RATE",
    callback=quantity(positive(parse_rate)),
    help="How fast one pod uploads, such as 1Gi/s: `keepstep doctor` measures it.",
)
@click.option(
    "--stall",
    "stall_seconds",
    metavar="DURATION",
    callback=duration,
    help="How long a save holds up training, such as 2s.",
)
@click.option(
    "--mtbf",
    "mtbf_seconds",
    metavar="DURATION",
    callback=quantity(positive(parse_seconds)),
    help="Mean time between failures of the whole job, such as 3h: that of one machine divided by their number.",
)
@click.option(
    "--pods",
    type=click.IntRange(1, WORLD_SIZE),
    help="How many pods share the writing and uploading evenly; 1 if one rank writes all.  [default: 1]",
)
@click.option(
    "--write",
    "write_seconds",
    metavar="DURATION",
    callback=duration,
    help="How long a save's files take to be written.  [default: the stall, as without asynchronous saves]",
)
@click.option(
    "--step",
    "step_seconds",
    metavar="DURATION",
    callback=quantity(positive(parse_seconds)),
    help="How long a step takes: gives the interval in steps. Needed with --keep-every-steps.",
)
@click.option(
    "--local-checkpoints",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="How many complete checkpoints the trainer keeps on the volume.",
)
@_with_settings
@price_option
@as_json_option
def plan(ledger: str | None, price_per_gib_month: float | None, as_json: bool, **values: Any) -> None:
    """Advise how often to save, and what that needs.

    The interval is Young's, the square root of 2 x stall x MTBF, and at least what a write and its upload take.
    The numbers are those of the options, and of a run's ledger where these are not given: the advice is as good.
    """
    flags = {one.name: values.pop(one.name) for one in _CHOSEN}
    with errors_reported():
        # Without a ledger a plan has no destination; the settings want one.
        flags["destination"] = ledger or "file:///planned"
        settings = load_some_settings(_SETTINGS, flags=flags, environment=os.environ, defaults={})
    if settings.retention.keep_every_steps and not values["step_seconds"]:
        raise click.UsageError("--keep-every-steps needs --step: how long a step takes")
    if ledger is not None:
        measured = asdict(run_work(settings, _measured(settings.store)))
        values |= {name: value for name, value in measured.items() if values[name] is None}
    missing = [option for name, option in _NEEDED.items() if values[name] is None]
    if missing:
        why = "the ledger does not tell them" if ledger else "or --ledger with a run that has measured them"
        raise click.UsageError(f"give {', '.join(missing)}: {why}")
    values["pods"] = values["pods"] or 1
    values["write_seconds"] = values["write_seconds"] or 0.0
    values["step_seconds"] = values["step_seconds"] or 0.0
    job = JobNumbers(retention=settings.retention, peak_factor=settings.disk.peak_factor, **values)
    advice = advise(job)
    annotations = _annotations(advice, settings)
    every = str(advice.interval_steps) if advice.interval_steps else f'"{advice.interval_seconds:.0f}s"'
    program = f"checkpointer.should_save(step, every={every})"
    cost = None if price_per_gib_month is None else advice.stored_bytes / GIB * price_per_gib_month
    if as_json:
        print_json(
            {
                **asdict(advice),
                **({} if cost is None else {"cost_per_month": round(cost, 6)}),
                "program": program,
                "annotations": annotations,
            }
        )
        return
    for line in table([*_rows(job, advice, cost)], folded={2: _WHY_WIDTH}):
        click.echo(line)
    click.echo("\nIn the program:")
    click.echo(f"  {program}")
    click.echo("Annotations of the pod template:")
    for key, value in annotations.items():
        click.echo(f'  {key}: "{value}"')
    click.echo()
    for line in table([("-", caveat.value) for caveat in advice.caveats], folded={1: _WHY_WIDTH}):
        click.echo(line)


async def _measured(settings: StoreSettings) -> MeasuredJob:
    async with opened(settings) as store:
        found = await read_ledger(store)
    if not found.lives:
        raise found.refusal or StoreError(
            ErrorKind.NOT_FOUND, f"{settings.destination} has no ledger", hint="give the destination of one run"
        )
    return measure_job(run_history(found.lives))


def _rows(job: JobNumbers, advice: SaveAdvice, cost: float | None) -> Iterator[tuple[str, str, str]]:
    steps = f", {advice.interval_steps} steps" if advice.interval_steps else ""
    stored = f"a write and its upload take {_time(job.stored_after_seconds)}"
    yield (
        "save interval",
        f"{_time(advice.interval_seconds)}{steps}",
        f"the longer of two: Young's formula says {_time(advice.young_seconds)}; {stored}",
    )
    yield "recovery point", _time(advice.recovery_point_seconds), "at worst: the interval, then a write and its upload"
    yield "stalls", f"{advice.stalled_percent:.2g} %", "of the time"
    lost = f"the mean of a failure without notice; {advice.lost_percent:.2g} % of the time"
    yield "lost work", _time(advice.lost_seconds), lost
    usual = f"; pods get {_USUAL_GRACE_SECONDS} s anyway" if advice.grace_seconds <= _USUAL_GRACE_SECONDS else ""
    yield (
        "grace period",
        f"{advice.grace_seconds} s",
        f"a just-in-time save, its upload and commit, and a margin{usual}",
    )
    kept = f"{job.local_checkpoints} kept, one being written, and room for one just in time"
    yield "volume", f"{amount(advice.volume_bytes)} a pod", kept
    whole = advice.bandwidth_bytes_per_second * job.pods
    yield (
        "bandwidth",
        f"{amount(advice.bandwidth_bytes_per_second)}/s a pod",
        f"on average; {amount(whole)}/s of the job",
    )
    saves = f"after a month, in which {advice.checkpoints_a_month:.0f} checkpoints are saved"
    yield "storage", amount(advice.stored_bytes), saves
    if cost is not None:
        yield "storage costs", f"{cost:,.2f}", "a month, by then"


def _time(seconds: float) -> str:
    """Format a duration to the second where an interval needs it."""
    return f"{seconds:.0f} s" if 10 <= seconds < _MINUTES_FROM_SECONDS else age(seconds)


def _annotations(advice: SaveAdvice, settings: Settings) -> Mapping[str, str]:
    """Return the annotations that say what the advice says. What pods get anyway needs none."""
    own = {one.name: one.key for one in OWN}
    values = {one.key: getattr(getattr(settings, one.section), one.name) for one in _CHOSEN}
    return {
        **({own["grace-seconds"]: str(advice.grace_seconds)} if advice.grace_seconds > _USUAL_GRACE_SECONDS else {}),
        own["size-limit"]: _as_quantity(advice.volume_bytes),
        **{one.annotation: text_of(one, values[one.key]) for one in _CHOSEN if values[one.key] != one.default},
    }


def _as_quantity(size_bytes: int) -> str:
    """Round a size up, as Kubernetes writes it."""
    unit, name = (GIB, "Gi") if size_bytes >= GIB else (MIB, "Mi")
    return f"{-(-size_bytes // unit)}{name}"
