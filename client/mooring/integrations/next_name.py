"""What to call a checkpoint that the program did not name: as it would have, where that can be told.

A program finds its checkpoints by their names, and often reads the step out of them. Pure.
"""

import re


def next_name(last_name: str | None, last_step: int, step: int, *, default: str) -> str:
    """`last_name` with `step` in place of `last_step`; `default` if there is none or it does not say its step once."""
    if last_name is None:
        return default
    name, replaced = re.subn(rf"(?<!\d){last_step}(?!\d)", str(step), last_name)
    return name if replaced == 1 else default
