"""Options as people write them: sizes, rates, durations, prices, addresses."""

import math
from collections.abc import Callable
from typing import Final

import click

from keepstep_agent.core.settings.table import parse_bytes, parse_seconds

_Callback = Callable[[click.Context, click.Parameter, str | None], float | None]


def quantity(parse: Callable[[str], float]) -> _Callback:
    """Return the callback of an option that `parse` reads. `parse` raises ValueError with what to write instead."""

    def read(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error), context, parameter) from error

    return read


def positive(parse: Callable[[str], float]) -> Callable[[str], float]:
    """Return `parse`, which then refuses 0."""

    def parsed(text: str) -> float:
        number = parse(text)
        if number <= 0:
            raise ValueError(f"{text[:40]!r} must be more than 0")
        return number

    return parsed


def parse_rate(text: str) -> float:
    """Parse `500MiB/s`, or a size, which is then that of a second. Raises ValueError."""
    return parse_bytes(text.strip().removesuffix("/s").rstrip())


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 <= price < math.inf:
        raise ValueError(f"{text[:40]!r} is not a price: write a number such as 0.023")
    return price


def host_and_port(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, int]:
    """Read an address, as the callback of an option. The host may be empty."""
    host, colon, port = value.rpartition(":")
    if not colon or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise click.BadParameter(f"{value!r} is not host:port, such as :8443 or 127.0.0.1:8443", context, parameter)
    return host.strip("[]"), int(port)


duration: Final = quantity(parse_seconds)

price_option: Final = click.option(
    "--price-per-gib-month",
    metavar="PRICE",
    callback=quantity(_price),
    help="Price of a GiB stored for a month, to show costs; in any currency.",
)
