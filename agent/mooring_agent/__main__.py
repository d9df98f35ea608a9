"""The `mooring` command. Says what to install if the agent's packages are missing."""

import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import Final

_HINT: Final = (
    "the command line needs the agent's packages: pip install 'mooring[agent]', or 'mooring[webhook]' for the webhook"
)
_PACKAGES: Final = frozenset(
    {"aiobotocore", "aiohttp", "awscrt", "botocore", "click", "cryptography", "google", "google.rpc", "grpc"}
    | {"grpc_health", "grpc_reflection", "msgspec", "prometheus_client", "psutil"}
    | {"structlog", "typing_extensions", "uvloop", "watchdog"}
)
"""The import names of what those extras install."""


def main() -> None:
    # Process 1 of a container ignores signals that it has no handler for. Some commands replace this handler.
    signal.signal(signal.SIGTERM, _leave_at_once)
    try:
        from mooring_agent.cli import cli

        cli(prog_name="mooring")
    except ModuleNotFoundError as error:
        if not _is_missing_package(error.name or ""):
            # A bug of ours, or a broken installation: the traceback says more.
            raise
        # Caught for each command too: many trainer images have click alone. Our own error printing may be missing.
        sys.stderr.write(f"error: {error}\nhint: {_HINT}\n")
        sys.exit(2)
    except SystemExit as leaving:
        _end_beside_store_threads(leaving)
        raise


def _leave_at_once(number: int, frame: FrameType | None) -> None:
    """Exit without joining threads, which may hang. As after a SIGKILL, the next start cleans up."""
    os._exit(128 + number)


def _is_missing_package(name: str) -> bool:
    """Whether one of `_PACKAGES` is missing as a whole, rather than a module within it."""
    root = name.partition(".")[0]
    return name in _PACKAGES or (root in _PACKAGES and sys.modules.get(root) is None)


def _end_beside_store_threads(leaving: SystemExit) -> None:
    """Exit at once if store threads are left: the interpreter would join them, and one may hang in a dead mount."""
    if any(thread.name.startswith("mooring-store") for thread in threading.enumerate()):
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))


if __name__ == "__main__":
    main()
