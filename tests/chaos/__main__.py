"""`make chaos MINUTES=60`: agents, trainers and stores die at random, and nothing that was promised may be lost.

python -m tests.chaos --minutes 60 --seed 7 --store seaweedfs

Each store in turn for three minutes at most, from a seed of its own. Ends with 1 when anything was lost.
"""

import argparse
import os
import secrets
import sys
import time

from tests.chaos.episode import run_episode
from tests.chaos.report import Report
from tests.chaos.store import available
from tests.servers.server import ENVIRONMENT

_EPISODE_SECONDS = 180.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill everything at random and see that nothing is lost.")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31), help="default: another each time")
    parser.add_argument("--store", action="append", choices=available(), help="default: all that are installed")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT, GRPC_ENABLE_FORK_SUPPORT="0")
    stores = arguments.store or available()
    began, total, number = time.monotonic(), Report(), 0
    # Every store gets its turn, however short.
    seconds = min(_EPISODE_SECONDS, arguments.minutes * 60 / len(stores))
    while number < len(stores) or time.monotonic() < began + arguments.minutes * 60:
        store, seed = stores[number % len(stores)], arguments.seed + number
        number += 1
        report = run_episode(store, seconds, seed)
        total.add(report)
        print(
            f"{(time.monotonic() - began) / 60:.1f} min: episode {number}, {store}, seed {seed}, "
            f"{report.counts['checkpoints committed']} commits, {len(report.losses)} losses",
            flush=True,
        )
    print("\n".join(["", *total.lines()]), flush=True)
    return 1 if total.losses else 0


if __name__ == "__main__":
    sys.exit(main())
