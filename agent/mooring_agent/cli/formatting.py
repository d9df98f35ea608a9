"""How the command line prints errors (one line `error:`, one line `hint:`, on stderr), sizes and times."""

from collections.abc import Iterator
from contextlib import contextmanager

import click

from mooring_agent.core.errors import ConfigurationError, MooringError, printable


@contextmanager
def errors_reported() -> Iterator[None]:
    """Report a MooringError and exit: with 2 for wrong settings, else with 1."""
    try:
        yield
    except ConfigurationError as error:
        for problem in error.problems:
            click.echo(f"error: {printable(problem)}", err=True)
        click.echo(f"hint: {printable(error.hint)}", err=True)
        raise SystemExit(2) from error
    except MooringError as error:
        report(error)
        raise SystemExit(1) from error


def report(error: MooringError) -> None:
    click.echo(f"error: {printable(str(error))}", err=True)
    if error.hint:
        click.echo(f"hint: {printable(error.hint)}", err=True)


def amount(size_bytes: float) -> str:
    """Format a size as in `1.5 GiB`."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def age(seconds: float) -> str:
    """Format a duration as in `3.2 s`, `4 min` or `2.5 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
