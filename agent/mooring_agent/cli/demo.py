"""`mooring demo`: a preemption, the loss of the disk and an exact resume, on one machine."""

import signal
import sys

import click

from mooring_agent.cli.formatting import errors_reported


@click.command()
@click.option("--keep", is_flag=True, help="Keep the demo's folder after it ends.")
def demo(keep: bool) -> None:
    """Train, get preempted, lose the disk, resume, and compare.

    Takes about a minute and needs only this machine. It shows that no step is lost, and compares every loss bit by bit.
    """
    with errors_reported():
        from mooring_agent.demo import run_demo

        # Exit by an exception, so that the demo ends its processes.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        code = run_demo(keep=keep)
    raise SystemExit(code)
