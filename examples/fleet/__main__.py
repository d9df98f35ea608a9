"""`make fleet`: twelve training runs with failures, and the page that shows them, on one machine."""

import argparse
import signal
import sys

from examples.fleet.fleet import show_fleet

from keepstep_agent.cli.formatting import errors_reported

_MOST_MINUTES = 600


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="make fleet",
        description="Train twelve small runs that are preempted, killed and broken, and show them in a browser. "
        "Needs only this machine. Ctrl-C ends all of it.",
    )
    parser.add_argument("--minutes", type=_minutes, default=60, help="end after so long without Ctrl-C (60)")
    parser.add_argument("--keep", action="store_true", help="keep the fleet's folder, to look around in it afterwards")
    arguments = parser.parse_args()
    # Exit by an exception, so that the fleet ends its processes. Closing a terminal sends SIGHUP.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_, number=number: sys.exit(128 + number))
    with errors_reported():
        show_fleet(limit_seconds=60.0 * arguments.minutes, keep=arguments.keep)


def _minutes(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_MINUTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of minutes from 1 to {_MOST_MINUTES}")
    return int(text)


if __name__ == "__main__":
    main()
