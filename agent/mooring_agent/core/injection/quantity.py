"""Kubernetes' quantities, such as `500m` and `10Gi`, as numbers."""

import re
from decimal import Decimal
from typing import Final

_SUFFIXES: Final = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", 1)},
    **{f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)},
}
# Two digits of an exponent are more than any machine has.
_QUANTITY: Final = re.compile(r"([+-]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30}))(?:[eE]([+-]?\d{1,2})|([a-zA-Z]{0,2}))")


def parse_quantity(value: object) -> Decimal:
    """`value` as JSON has it, a text or a number. Raises ValueError."""
    text = str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
    match = _QUANTITY.fullmatch(text)
    if not match or (match[3] or "") not in _SUFFIXES:
        raise ValueError(f"{value!r} is no quantity; write it as 500m, 2, 256Mi or 10Gi")
    number = Decimal(match[1])
    return number.scaleb(int(match[2])) if match[2] else number * _SUFFIXES[match[3] or ""]


def quantity_or_nothing(value: object) -> Decimal:
    """0 for nothing, and for what the API server will refuse."""
    try:
        return parse_quantity(value)
    except ValueError:
        return Decimal(0)
