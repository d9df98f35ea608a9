"""How log lines are written, by the agent and by commands, and lines for people.

Invariant: nothing here raises because the reader is gone, as on a closed pipe.
"""

import contextlib
import io
import logging
import sys
import warnings
from pathlib import PurePath
from typing import TextIO, cast

import structlog

from keepstep_agent.core.errors import printable, without_passwords


def configure_logs(log_format: str) -> None:
    """Log one line per event on stderr, also of warnings and of libraries: a constant event name and its fields."""
    renderers: list[structlog.typing.Processor] = (
        [structlog.processors.JSONRenderer()]
        if log_format == "json"
        else [_without_controls, structlog.dev.ConsoleRenderer(colors=False)]
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _without_passwords,
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        # The program of a run writes to stderr too. A line and its end are one write, so that lines do not mix.
        logger_factory=structlog.WriteLoggerFactory(file=_stderr()),
        cache_logger_on_first_use=False,
    )
    warnings.showwarning = _log_warning
    logging.basicConfig(handlers=[_LibraryLines()])


class _LibraryLines(logging.Handler):
    """What libraries log, warnings and worse, as lines like all others."""

    def emit(self, record: logging.LogRecord) -> None:
        line = structlog.get_logger("keepstep.python")
        write = line.error if record.levelno >= logging.ERROR else line.warning
        try:
            message = record.getMessage()
        except Exception:
            self.handleError(record)
            return
        write("python.log", library=record.name, message=message, exc_info=record.exc_info)


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    structlog.get_logger("keepstep.python").warning(
        "python.warning", kind=category.__name__, message=str(message), where=f"{PurePath(filename).name}:{lineno}"
    )


def _without_passwords(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Leave out what no log may hold: an endpoint is a field of some lines, and a part of other libraries' messages."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = without_passwords(value)
    return event


def _without_controls(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Escape control characters, which a terminal obeys: names and messages may be anybody's. Tracebacks keep lines."""
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[key] = "\n".join(printable(line) for line in (value.split("\n") if key == "exception" else [value]))
    return event


def say(line: str) -> None:
    """Write a line for people to stderr."""
    stderr = _stderr()
    stderr.write(f"{without_passwords(line)}\n")
    stderr.flush()


class _UnheardStderr(io.TextIOBase):
    """Writes to the current `sys.stderr`. Drops what cannot be written: there is no other place to report it."""

    def write(self, text: str) -> int:
        if sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        if sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()


def _stderr() -> TextIO:
    return cast(TextIO, _UnheardStderr())
