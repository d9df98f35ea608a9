"""10,000 files of 100 KiB, up and down: files per second."""

from collections.abc import Callable, Mapping
from typing import Final

from benchmarks.data_path.comparison import KEEPSTEP, Result, compare, is_peer, measured
from benchmarks.data_path.goals import Goal, at_least
from benchmarks.data_path.keepstep import Keepstep
from benchmarks.data_path.tools import Tool, peers
from benchmarks.data_path.workplace import open_workplace

FILES: Final = 10_000
FILE_BYTES: Final = 100 << 10


def small_files(rounds: int, say: Callable[[str], None], files: int = FILES) -> dict[str, list[Result]]:
    """By mode."""
    with open_workplace({f"f{number:05d}.bin": FILE_BYTES for number in range(files)}) as place:
        keepstep = Keepstep()
        # A part size is nothing to files that are smaller; what else is tuned only helps.
        tools: list[Tool] = [keepstep, *(tool for tool in peers() if tool.name.endswith("tuned"))]
        with place.job(upload=True, secure=False) as job:
            keepstep.prepare(job)
        return {
            mode: compare(place, tools, mode=mode, rounds=rounds, say=say, hopeless_after=1)
            for mode in ("upload-http", "download-http")
        }


def goals(results: Mapping[str, list[Result]]) -> list[Goal]:
    found = []
    for mode, rows in results.items():
        ours = next((row for row in measured(rows) if row.tool == KEEPSTEP), None)
        others = [row for row in measured(rows) if is_peer(row.tool)]
        if ours and others:
            best = max(others, key=lambda row: row.rate)
            found.append(at_least(f"{FILES:,} files of {FILE_BYTES >> 10} KiB, {mode}: files/s", ours, best))
    return found
