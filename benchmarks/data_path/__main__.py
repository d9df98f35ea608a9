"""`python -m benchmarks.data_path`: see `--help`, and CONTRIBUTING."""

import argparse
import os
import sys

from benchmarks.data_path.comparison import MODES, Result, compare, measured, only, source_sizes
from benchmarks.data_path.mooring import Mooring
from benchmarks.data_path.tools import Tool, limits, peers
from benchmarks.data_path.workplace import open_workplace


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_path", description=__doc__)
    parser.add_argument("--only", default="", help="tools, by the beginning of their names: mooring,limits,s5cmd")
    parser.add_argument("--mode", action="append", choices=MODES, help="may be repeated; without it all")
    parser.add_argument("--size", type=float, default=2.0, help="GiB in four files")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    results: dict[str, list[Result]] = {}
    with open_workplace(source_sizes(arguments.size)) as place:
        mooring = Mooring()
        tools: list[Tool] = [mooring, *limits(place.programs.limits), *peers()]
        modes = arguments.mode or list(MODES)
        chosen = only(tools, arguments.only)
        if mooring in chosen and any(mode.startswith("download") for mode in modes):
            with place.job(upload=True, secure=False) as job:
                mooring.prepare(job)
        for mode in modes:
            results[mode] = compare(place, chosen, mode=mode, rounds=arguments.rounds, say=_say)
    for mode, rows in results.items():
        print(f"\n{mode}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
        print(f"{'':28}{'GB/s':>7}{'CPU s/GB':>10}{'min':>7}{'max':>7}{'anon MiB':>10}{'RSS MiB':>9}"
              f"{'start CPU s':>12}{'requests':>10}  check")  # fmt: skip
        for row in measured(rows):
            last = row.measurements[-1]
            print(
                f"{row.tool:28}{row.rate:7.2f}{row.cost:10.3f}{min(row.costs):7.3f}{max(row.costs):7.3f}"
                f"{last.peak_anonymous_bytes >> 20:10}{last.peak_rss_bytes >> 20:9}{last.start_cpu_seconds:12.3f}"
                f"{last.counts.requests:10}  {row.check}"
            )
    return 1 if any(row.failure for rows in results.values() for row in rows) else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
