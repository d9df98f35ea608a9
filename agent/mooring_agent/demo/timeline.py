"""What a person sees of the demo: one line per thing worth noticing, the seconds since the start at its left."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.text import Text

_SECONDS_WIDTH: Final = 6


class Timeline:
    """Prints as things happen; on a terminal the last line shows what is going on now."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._start = time.time()
        self._status = self._console.status("")

    def say(self, text: str, *, style: str = "", at: float | None = None) -> None:
        """`at`: Unix time in seconds when it happened, if not now."""
        seconds = (time.time() if at is None else at) - self._start
        clock = Text(f"{seconds:{_SECONDS_WIDTH}.1f} s  ", style="dim")
        self._console.print(clock + Text(text, style=style), soft_wrap=True)

    def heading(self, text: str) -> None:
        self._console.print(f"\n[bold]{escape(text)}[/]")

    def plain(self, text: str, *, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        with self._status:
            yield

    def now(self, text: str) -> None:
        self._status.update(f"[dim]{escape(text)}[/]")
