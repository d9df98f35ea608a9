"""Loads structlog without rich, which it would take along to draw tracebacks in colours that no log of ours has.

For what runs beside a trainer for days: rich is five megabytes, and half of structlog's time to load. Commands that
print tables import rich themselves, and must not come here first.
"""

import sys


def load_structlog_alone() -> None:
    """Once it is loaded, every `import structlog` finds it so."""
    if "structlog" in sys.modules or "rich" in sys.modules:
        return
    # An import of what is None here fails as if it were not installed, and structlog is made for that.
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        import structlog  # noqa: F401 - to have it loaded is all
    finally:
        del sys.modules["rich"]
