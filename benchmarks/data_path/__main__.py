"""Keepstep's data path beside its peers: CPU, throughput and memory of the same transfers, in one run.

Prints the tables; with --output it writes RESULTS.md and plots into that folder, or EVENT_LOOP.md alone if another
checkout is measured beside this one. Exits 1 if a goal is missed.
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks.data_path import series, small_files
from benchmarks.data_path.comparison import MODES, Result, compare, measured, only, source_sizes
from benchmarks.data_path.goals import comparison_goals
from benchmarks.data_path.keepstep import Keepstep
from benchmarks.data_path.memory import measure_memory
from benchmarks.data_path.notice import ROUNDS, measure_notice
from benchmarks.data_path.plots import plot_comparison, plot_series
from benchmarks.data_path.report import Report, heading
from benchmarks.data_path.tools import Tool, limits, peers
from benchmarks.data_path.workplace import open_workplace

SECTIONS = ("comparison", "small-files", "number", "size", "memory", "notice")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_path", description=__doc__)
    parser.add_argument("--section", action="append", choices=SECTIONS, help="may be repeated; without it all")
    parser.add_argument("--only", default="", help="in the comparison: tools by the beginning of their names")
    parser.add_argument("--mode", action="append", choices=MODES, help="in the comparison; may be repeated")
    parser.add_argument("--size", type=float, default=2.0, help="GiB of the comparison, in four files")
    parser.add_argument("--rounds", type=int, default=5, help="of the comparison and of small files")
    parser.add_argument("--beside", type=Path, help="in the comparison: another checkout, whose code is measured too")
    parser.add_argument("--quick", action="store_true", help="a smoke test: one round of everything, small")
    parser.add_argument("--output", type=Path, help="folder for RESULTS.md and the plots")
    options = parser.parse_args()
    # A with statement cleans up after an exception, not after a signal.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if options.quick:
        options.size, options.rounds = 0.125, 1
    elif options.only or options.mode or options.beside:
        options.section = options.section or ["comparison"]
    sections = options.section or SECTIONS
    report = Report()
    with tempfile.TemporaryDirectory(prefix="keepstep-plots-") as unwanted:
        plots = Path(unwanted) if options.beside else options.output or Path(unwanted)
        plots.mkdir(parents=True, exist_ok=True)
        if "comparison" in sections:
            _comparison(report, options, plots)
        if "small-files" in sections:
            _small_files(report, options.rounds, files=200 if options.quick else small_files.FILES)
        if "number" in sections:
            found = series.by_number(1, _say, (1, 10) if options.quick else series.NUMBERS)
            report.series("512 MiB, by the number of files", "files", found)
            plot_series("files that hold 512 MiB", found, plots / "data-path-number.png")
        if "size" in sections:
            found = series.by_size(1, _say, (64, 128) if options.quick else series.SIZES_MIB)
            report.series("Four files, by their size", "MiB", found)
            plot_series("MiB in four files", found, plots / "data-path-size.png")
        if "memory" in sections:
            _memory(report, gibibytes=0.5 if options.quick else 8.0)
        if "notice" in sections:
            _notice(report, rounds=1 if options.quick else ROUNDS, gibibytes=0.5 if options.quick else 2.0)
        text = report.text(heading(rounds=options.rounds, gibibytes=options.size, beside=bool(options.beside)))
        print(text)
        if options.output:
            (options.output / ("EVENT_LOOP.md" if options.beside else "RESULTS.md")).write_text(text)
    return 0 if all(goal.met for goal in report.goals) and not report.failures else 1


def _comparison(report: Report, options: argparse.Namespace, plots: Path) -> None:
    results: dict[str, list[Result]] = {}
    with open_workplace(source_sizes(options.size)) as place:
        keepstep = Keepstep()
        tools: list[Tool] = only([keepstep, *limits(place.programs.limits), *peers()], options.only)
        other = Keepstep(checkout=options.beside.resolve()) if options.beside else None
        if other:
            tools.append(other)
        modes = options.mode or list(MODES)
        if keepstep in tools and any(mode.startswith("download") for mode in modes):
            with place.job(upload=True, secure=False) as job:
                keepstep.prepare(job)
        for mode in modes:
            results[mode] = compare(place, tools, mode=mode, rounds=options.rounds, say=_say)
            report.comparison(mode, results[mode])
            plot_comparison(mode, results[mode], plots / f"data-path-{mode}.png")
            if not other:
                report.lines += ["", f"![{mode}](data-path-{mode}.png)"]
            by_name = {result.tool: result for result in measured(results[mode])}
            if other and keepstep.name in by_name and other.name in by_name:
                report.beside(mode, by_name[keepstep.name], by_name[other.name])
    report.goals += comparison_goals(results)


def _small_files(report: Report, rounds: int, *, files: int) -> None:
    results = small_files.small_files(rounds, _say, files)
    for mode, rows in results.items():
        title = f"{files:,} files of {small_files.FILE_BYTES >> 10} KiB, {mode}"
        report.comparison(title, rows, files=files)
    report.goals += small_files.goals(results)


def _memory(report: Report, *, gibibytes: float) -> None:
    with open_workplace(source_sizes(gibibytes)) as place:
        rows, goals = measure_memory(place, _say)
    title = f"Memory of Keepstep for {gibibytes:g} GiB"
    report.section(title, "| transfer | anonymous MiB, peak | RSS MiB, peak |", "|---|---|---|", *rows)
    report.goals += goals


def _notice(report: Report, *, rounds: int, gibibytes: float) -> None:
    with open_workplace(source_sizes(gibibytes)) as place:
        rows, goals = measure_notice(place, _say, rounds)
    head = "| while it is busy with | rounds | ms, median | ms, worst |"
    report.section("From a termination notice to the signal that the ranks read", head, "|---|---|---|---|", *rows)
    report.goals += goals


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
