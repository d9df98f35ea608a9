"""`make demo`: a preemption, the loss of the disk and an exact resume, on one machine."""

import argparse
import signal
import sys

from examples.demo.story import run_demo

from keepstep_agent.cli.formatting import errors_reported


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="make demo",
        description="Train, get preempted, lose the disk, resume, and compare every loss bit by bit. "
        "Takes about a minute and needs only this machine.",
    )
    parser.add_argument("--keep", action="store_true", help="keep the demo's folder, to look around in it afterwards")
    arguments = parser.parse_args()
    # Exit by an exception, so that the demo ends its processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with errors_reported():
        code = run_demo(keep=arguments.keep)
    sys.exit(code)


if __name__ == "__main__":
    main()
