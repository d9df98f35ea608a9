"""Renders the pages from templates. Everything in them is escaped; names of strangers are bounded and made visible."""

import functools
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlencode

import jinja2
from markupsafe import Markup, escape

from keepstep_agent import __version__
from keepstep_agent.console.listing import COLUMNS
from keepstep_agent.console.timeline import WIDTH
from keepstep_agent.core.errors import printable
from keepstep_agent.core.limits import UNIX_SECONDS
from keepstep_agent.core.policies.goodput import WHY, Cause
from keepstep_agent.core.policies.run_overview import RunOverview, RunStanding
from keepstep_agent.core.quantities import age, amount

_SHOWN_CHARACTERS: Final = 120
_LONG_COUNT: Final = 1e12
MOST_SHOWN: Final = 1024


@functools.cache
def _templates() -> jinja2.Environment:
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("keepstep_agent.console"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    templates.filters |= {
        "age": age,
        "amount": amount,
        "breakable": breakable,
        "count": count,
        "moment": moment,
        "percent": lambda share: f"{share:.1%}",
        "shown": shown,
        "stamp": stamp,
    }
    templates.globals |= {
        "columns": COLUMNS,
        "run_address": run_address,
        "states": [state.value for state in RunStanding],
        "stored": stored,
        "version": __version__,
        "why": {cause.value: text for cause, text in WHY.items()},
        "causes": [cause.value for cause in Cause],
        "axis_width": WIDTH,
    }
    return templates


def render(template: str, **values: Any) -> str:
    """Return the page that the template of this name makes."""
    return _templates().get_template(f"{template}.html").render(values)


def shown(text: str, most: int = _SHOWN_CHARACTERS) -> str:
    """Return a stranger's text without anything that hides or reorders what follows, and not longer than `most`."""
    return printable(text if len(text) <= most else f"{text[: most - 1]}…")


def count(number: float) -> str:
    """Format what a program counts: exactly if it is whole and can be read at a glance."""
    return f"{number:,.0f}" if number < _LONG_COUNT and number == int(number) else f"{number:,.4g}"


def breakable(text: str) -> Markup:
    """Return a name that may go on in the next line after each of its slashes."""
    return escape(text).replace("/", Markup("/<wbr>"))


def moment(at: float) -> str:
    """Format unix seconds as in `2026-11-26 02:19:56 UTC`."""
    return _utc(at).strftime("%Y-%m-%d %H:%M:%S UTC")


def stamp(at: float) -> str:
    """Format unix seconds as the `datetime` of a `<time>`."""
    return _utc(at).strftime("%Y-%m-%dT%H:%M:%SZ")


def _utc(at: float) -> datetime:
    # A file's time may be anything, also one that no calendar has.
    return datetime.fromtimestamp(min(max(at, 0.0), UNIX_SECONDS), UTC)


def run_address(name: str) -> str:
    """Return the address of a run's page. The name is in the query: in a path, browsers would resolve a `..`."""
    return f"/run?{urlencode({'name': name})}"


def stored(overview: RunOverview) -> str:
    """Say how many bytes the committed checkpoints take, as far as it is known."""
    if overview.unsized and not overview.stored_bytes:
        return "unknown"
    least = "at least " if overview.unsized or not overview.all_listed else ""
    return f"{least}{amount(overview.stored_bytes)}"
