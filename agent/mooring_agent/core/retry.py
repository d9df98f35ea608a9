"""Error kind x attempt -> delay before the next try, or stop.

Retrying has no end for what can pass or be mended: a checkpoint on the volume is worth more than the requests it costs.
"""

from typing import Final

from mooring_agent.core.errors import RETRYABLE, ErrorKind

_FIRST_DELAY_SECONDS: Final = 0.2
_LONGEST_DELAY_SECONDS: Final = 10.0
# A person has to act first, so asking often only costs.
_LONGEST_DELAY_WHEN_REFUSED_SECONDS: Final = 30.0
_NEEDS_A_PERSON: Final = frozenset(
    {
        ErrorKind.ACCESS_DENIED,
        ErrorKind.BUCKET_MISSING,
        ErrorKind.CLOCK_SKEWED,
        ErrorKind.REQUEST_REFUSED,
        ErrorKind.BAD_CONFIGURATION,
    }
)
_ATTEMPTS_THAT_STILL_DOUBLE: Final = 12


def retry_delay_seconds(kind: ErrorKind, attempt: int, jitter: float) -> float | None:
    """Seconds to wait after failure number `attempt` (from 1); None: trying again cannot help.

    `jitter` in [0, 1) spreads the retries of many parts and pods over the upper half of the delay.
    """
    if kind not in RETRYABLE:
        return None
    longest = _LONGEST_DELAY_WHEN_REFUSED_SECONDS if kind in _NEEDS_A_PERSON else _LONGEST_DELAY_SECONDS
    doubled = _FIRST_DELAY_SECONDS * 2.0 ** min(attempt - 1, _ATTEMPTS_THAT_STILL_DOUBLE)
    return min(longest, doubled) * (0.5 + 0.5 * jitter)
