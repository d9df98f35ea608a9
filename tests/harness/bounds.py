"""How long a test waits for something that comes, however busy its machine is."""

from typing import Final

HANG_SECONDS: Final = 300.0
"""Of any wait for a condition, a process or an answer. It ends a hang and judges no speed: the time-out of a test
(`timeout` in pyproject.toml) is longer, so that a wait says what it waited for."""
