"""Runs the command line: how a container ends by a signal, and what to install for some commands."""

import contextlib
import os
import signal
import sys
import threading
from types import FrameType

from keepstep_api import __version__

_NEVER_USED = ("rich", "httpx2")
"""What structlog and aiobotocore import if somebody has installed it, which takes a fifth of a second of each start."""
_EXTRAS = {"cryptography": "webhook", "jinja2": "console"}
"""What has to be installed for a command that needs more than the agent, by what is missing."""

_NOEXEC = "failed to map segment"
"""What the dynamic linker says of a library on a disk that is mounted noexec."""


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        # Without all that the other commands load.
        print(f"keepstep, version {__version__}")  # noqa: T201 - what the command is asked for
        return
    # Process 1 of a container ignores signals that it has no handler for. Some commands replace this handler.
    signal.signal(signal.SIGTERM, _leave_at_once)
    for name in _NEVER_USED:
        # An import of it then fails as if it were not there.
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # None: no module
    try:
        from keepstep_agent.cli import cli

        cli(prog_name="keepstep")
    except ImportError as error:
        if _NOEXEC in str(error):
            hint = "the disk is mounted noexec: install the agent, or set PEX_ROOT for the one file, on another one"
        elif isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
            hint = f"uv tool install 'keepstep-agent[{_EXTRAS[error.name]}]'"
        else:
            # A bug of ours, or a broken installation: the traceback says more.
            raise
        sys.stderr.write(f"error: {error}\nhint: {hint}\n")
        sys.exit(2)
    except SystemExit as leaving:
        _end_beside_store_threads(leaving)
        raise


def _leave_at_once(number: int, frame: FrameType | None) -> None:
    """Exit without joining threads, which may hang. As after a SIGKILL, the next start cleans up."""
    os._exit(128 + number)


def _end_beside_store_threads(leaving: SystemExit) -> None:
    """Exit at once if store threads are left: the interpreter would join them, and one may hang in a dead mount."""
    if any(thread.name.startswith("keepstep-store") for thread in threading.enumerate()):
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))


if __name__ == "__main__":
    main()
