"""`mooring demo`: the whole story in two minutes on one machine."""

import signal
import sys

import click

from mooring_agent.cli.formatting import errors_reported


@click.command()
@click.option("--keep", is_flag=True, help="Keep the demo's folder, to look around in it afterwards.")
def demo(keep: bool) -> None:
    """Train, get preempted, lose the disk, resume, and compare.

    Shows in about a minute, on this machine alone, that not a single step is lost, bit by bit.
    """
    with errors_reported():
        from mooring_agent.demo import run_demo

        # Leave by an exception, so that the demo takes its processes with it.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        code = run_demo(keep=keep)
    raise SystemExit(code)
