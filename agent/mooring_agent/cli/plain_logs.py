"""Loads structlog without rich, which it would import for coloured tracebacks that our logs do not have.

This is for commands that run beside a trainer for days: rich takes five megabytes, and half of structlog's time to
load. Commands that print tables import rich themselves, and must not call this first.
"""

import sys


def load_structlog_alone() -> None:
    """Import structlog without rich. Every later `import structlog` gets the same module."""
    if "structlog" in sys.modules or "rich" in sys.modules:
        return
    # With None here, `import rich` fails as if it were not installed, which structlog supports.
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        import structlog  # noqa: F401 - only to load it
    finally:
        del sys.modules["rich"]
