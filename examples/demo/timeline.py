"""Prints what happens, one line for each event, with the seconds since the start."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click

_SECONDS_WIDTH: Final = 6
_CLEARED: Final = "\x1b[K"
"""Clears the line to its end. click leaves it out where there is no terminal."""


class Timeline:
    """Prints events as they happen. On a terminal the last line shows what is going on now."""

    def __init__(self) -> None:
        self._start = time.time()

    def say(self, text: str, *, style: str = "", at: float | None = None) -> None:
        """Print an event. `at` is the Unix time in seconds when it happened, if not now."""
        seconds = (time.time() if at is None else at) - self._start
        click.echo(_CLEARED + click.style(f"{seconds:{_SECONDS_WIDTH}.1f} s  ", dim=True) + _styled(text, style))

    def heading(self, text: str) -> None:
        self.plain(f"\n{text}", style="bold")

    def plain(self, text: str, *, style: str = "") -> None:
        click.echo(_CLEARED + _styled(text, style))

    @contextmanager
    def going_on(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.now("")

    def now(self, text: str) -> None:
        if sys.stdout.isatty():
            click.echo(f"{_CLEARED}{click.style(text, dim=True)}\r", nl=False)


def _styled(text: str, style: str) -> str:
    """Style a text as `style` names it: bold, a colour, or both."""
    words = style.split()
    return click.style(text, fg=next((word for word in words if word != "bold"), None), bold="bold" in words or None)
