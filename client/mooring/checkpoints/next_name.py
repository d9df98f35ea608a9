"""How a checkpoint is called after the one before it, where a program gives its own names."""

import re


def next_name(last_name: str | None, last_step: int, step: int, *, default: str) -> str:
    """Return `last_name` with `step` in place of `last_step`; `default` if that is None or lacks its step.

    Also `default` if the step is in the name more than once. Programs find their checkpoints by name, and often read
    the step from it.
    """
    if last_name is None:
        return default
    name, replaced = re.subn(rf"(?<!\d){last_step}(?!\d)", str(step), last_name)
    return name if replaced == 1 else default
