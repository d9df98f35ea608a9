"""Options that are quantities, durations and prices, as people write them."""

import math
from collections.abc import Callable
from typing import Final

import click

from mooring_agent.core.settings.table import parse_seconds

_Callback = Callable[[click.Context, click.Parameter, str | None], float | None]


def quantity(parse: Callable[[str], float]) -> _Callback:
    """Return the callback of an option that `parse` reads. `parse` raises ValueError with what to write instead."""

    def read(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error), context, parameter) from error

    return read


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 <= price < math.inf:
        raise ValueError(f"{text[:40]!r} is not a price: write a number such as 0.023")
    return price


duration: Final = quantity(parse_seconds)

price_option: Final = click.option(
    "--price-per-gib-month",
    metavar="PRICE",
    callback=quantity(_price),
    help="Price of a GiB stored for a month, to show costs; in any currency.",
)
