"""`mooring` on the command line. Says what to install when only the trainer's side is here."""

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
    | {"grpc_health", "grpc_reflection", "h11", "msgspec", "prometheus_client", "psutil", "rich"}
    | {"structlog", "typing_extensions", "uvloop", "watchdog"}
)
"""What those extras install, as it is imported."""


def main() -> None:
    # Process 1 of a container never sees a signal that it has no handler for. Some commands replace this one.
    signal.signal(signal.SIGTERM, _leave_at_once)
    try:
        from mooring_agent.cli import cli

        cli(prog_name="mooring")
    except ModuleNotFoundError as error:
        if not _is_missing_package(error.name or ""):
            # A mistake of ours, or a broken installation: its traceback says more.
            raise
        # Also of one command: click alone is in many a trainer's image. Nothing of ours may be there to say it with.
        sys.stderr.write(f"error: {error}\nhint: {_HINT}\n")
        sys.exit(2)
    except SystemExit as leaving:
        _end_beside_store_threads(leaving)
        raise


def _leave_at_once(number: int, frame: FrameType | None) -> None:
    """As after a SIGKILL, whatever hangs: the next start cleans up what was half-done, and joins no thread."""
    os._exit(128 + number)


def _is_missing_package(name: str) -> bool:
    """Whether a package of those is not there at all; a part that one lacks is another matter."""
    root = name.partition(".")[0]
    return name in _PACKAGES or (root in _PACKAGES and sys.modules.get(root) is None)


def _end_beside_store_threads(leaving: SystemExit) -> None:
    """The interpreter's end would join a thread that hangs in a dead mount, and so never come."""
    if any(thread.name.startswith("mooring-store") for thread in threading.enumerate()):
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))


if __name__ == "__main__":
    main()
