"""How the command line says what went wrong: one line `error:`, one line `hint:`, on stderr."""

from collections.abc import Iterator
from contextlib import contextmanager

import click

from mooring_agent.core.errors import ConfigurationError, MooringError
from mooring_agent.core.printable import printable


@contextmanager
def errors_reported() -> Iterator[None]:
    """MooringErrors inside end the program: with 2 for wrong settings, else with 1."""
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
