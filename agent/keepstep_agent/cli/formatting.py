"""How the command line prints errors (one line `error:`, one line `hint:`, on stderr), sizes, times, tables, progress.

Names come from strangers' buckets, so what a terminal would obey is escaped.
"""

import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Final

import click

from keepstep_agent.core.errors import ConfigurationError, KeepstepError, printable
from keepstep_agent.core.quantities import age, amount

_GAP: Final = "  "
_PIPED_WIDTH: Final = 10_000
"""In a pipe or a file, lines do not wrap."""
_REDRAW_SECONDS: Final = 0.1
_TO_START_OF_CLEARED_LINE: Final = "\r\x1b[K"


@contextmanager
def errors_reported() -> Iterator[None]:
    """Report a KeepstepError and exit: with 2 for wrong settings, else with 1."""
    try:
        yield
    except ConfigurationError as error:
        for problem in error.problems:
            click.echo(f"error: {printable(problem)}", err=True)
        click.echo(f"hint: {printable(error.hint)}", err=True)
        raise SystemExit(2) from error
    except KeepstepError as error:
        report(error)
        raise SystemExit(1) from error


def report(error: KeepstepError) -> None:
    click.echo(f"error: {printable(str(error))}", err=True)
    if error.hint:
        click.echo(f"hint: {printable(error.hint)}", err=True)


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), folded: Mapping[int, int]) -> Iterator[str]:
    """Yield the lines of a table with aligned columns: those in `right` to the right, the others to the left.

    If the terminal is too narrow, the cells of the columns in `folded` wrap, down to the width given there. Nothing is
    ever truncated.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(1, *map(len, column)) for column in zip(*rows, strict=True)]
    terminal = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPED_WIDTH
    for column, least in folded.items():
        excess = sum(widths) + len(_GAP) * (len(widths) - 1) - terminal
        widths[column] -= max(0, min(excess, widths[column] - least))
    for row in rows:
        cells = [textwrap.wrap(cell, width, break_on_hyphens=False) for cell, width in zip(row, widths, strict=True)]
        for pieces in zip_longest(*cells, fillvalue=""):
            aligned = (
                piece.rjust(width) if column in right else piece.ljust(width)
                for column, (piece, width) in enumerate(zip(pieces, widths, strict=True))
            )
            yield _GAP.join(aligned).rstrip()


@contextmanager
def progress_line() -> Iterator[Callable[[str, int, int], None]]:
    """Show progress in one line if stderr is a terminal. Yields the function that takes what is done, and bytes."""
    began_at, drawn_at = time.monotonic(), 0.0

    def advance(what: str, done: int, total: int) -> None:
        nonlocal drawn_at
        now = time.monotonic()
        if not sys.stderr.isatty() or now - drawn_at < _REDRAW_SECONDS:
            return
        drawn_at, rate = now, done / max(now - began_at, 0.001)
        left = f", {age((total - done) / rate)} left" if rate else ""
        line = f"{printable(what)}: {amount(done)} of {amount(total)}, {amount(rate)}/s{left}"[
            : shutil.get_terminal_size().columns - 1
        ]
        # The cursor returns, so that a line of the log replaces this one.
        click.echo(f"{_TO_START_OF_CLEARED_LINE}{line}\r", nl=False, err=True, color=True)

    try:
        yield advance
    finally:
        if drawn_at:
            click.echo(_TO_START_OF_CLEARED_LINE, nl=False, err=True, color=True)
