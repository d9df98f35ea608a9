"""`mooring` on the command line. Says what to install when only the trainer's side is here."""

import contextlib
import os
import sys
import threading


def main() -> None:
    try:
        from mooring_agent.cli import cli
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - nothing else can be imported
        print("hint: the command line needs the agent's packages: pip install 'mooring[agent]'", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    try:
        cli(prog_name="mooring")
    except SystemExit as leaving:
        _end_beside_store_threads(leaving)
        raise


def _end_beside_store_threads(leaving: SystemExit) -> None:
    """The interpreter's end would join a thread that hangs in a dead mount, and so never come."""
    if any(thread.name.startswith("mooring-store") for thread in threading.enumerate()):
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))


if __name__ == "__main__":
    main()
