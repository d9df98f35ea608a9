"""Programs that know nothing of Keepstep resume from snapshots of their output directories, whatever they write there.

`training.py` says what the programs are like. A program that takes a checkpoint which is not whole, or a mix of two
saves, crashes or ends with another digest.
"""

import os
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.harness.warm_python import warm_python
from tests.programs.bin_shards import SHARDS
from tests.programs.lives import RESTLESS_PACE, VERY_SLOW_WRITES, Ending, Lives, Moment, Snapshot
from tests.programs.training import PIECE_BYTES, newest

PROGRAMS = {
    "one-file": [
        "one_file_in_place",
        "keras_archive",
        "msgpack_in_place",
        "renames_previous",
    ],
    "files-side-by-side": [
        "files_side_by_side",
        "best_model_copy",
        "weights_h5",
        "bin_shards",
        "growing_logs",
    ],
    "folders": [
        "tracker_file",
        "nested_four_deep",
        "timestamped_runs",
        "slow_writer",
        "gathered_shards",
        "nested_dcp",
    ],
    "cut-short": [
        "final_model_beside_checkpoints",
        "keeps_one",
        "keeps_two",
        "two_ranks",
        "latest_link",
        "unknown_layout",
    ],
    "restless": [
        "one_file_replaced",
        "last_and_best",
        "numbered_and_named",
        "json_in_place",
        "lines_alone",
        "output_beside",
        "moved_in",
    ],
    "many-files": [
        "many_folders_in_place",
        "hashed_files",
        "renamed_folders",
        "rewritten_folder",
        "fewer_each_time",
        "many_small_files",
    ],
    "links-and-databases": [
        "absolute_link",
        "hard_links",
        "sqlite_with_log",
        "sqlite_with_journal",
    ],
}
RESTLESS = frozenset({*PROGRAMS["restless"], "many_folders_in_place", "hashed_files", "many_small_files"})
QUICK = ["files_side_by_side", "last_and_best", "json_in_place", "many_folders_in_place", "hashed_files"]
"""Each writes in another way. They are killed in `make test`, all others in `make test-all`."""
REAL_WRITERS = {
    "h5py_in_place": "h5py",
    "joblib_pickle": "joblib",
    "lmdb_environment": "lmdb",
    "orbax_manager": "orbax.checkpoint",
    "tensorstore_array": "tensorstore",
    "xgboost_model": "xgboost",
    "zarr_group": "zarr",
}
"""Programs by the package that writes for them."""
WITH_TORCH = ("one_file_in_place", "best_model_copy")
ALL = [name for group in PROGRAMS.values() for name in group]
STEPS = 200
ENDLESS_STEPS = 100_000
RESTLESS_HELD_SECONDS = 15.0
BEFORE = 40
WRITES = (Moment.EARLY_WRITE, Moment.WRITE, Moment.ANY, Moment.JUST_SAVED, Moment.WRITE)
ROUNDS = [(moment, ending) for ending in (Ending.PROGRAM, Ending.EVERYTHING) for moment in 2 * WRITES]
ROUNDS += [(Moment.WRITE, Ending.TOLD), (Moment.JUST_SAVED, Ending.TOLD)]
QUICK_ROUNDS = [
    (Moment.EARLY_WRITE, Ending.PROGRAM),
    (Moment.WRITE, Ending.EVERYTHING),
    (Moment.ANY, Ending.TOLD),
]


def uninterrupted(program: str, output: Path, steps: int) -> list[str]:
    """Run it without Keepstep; return its lines."""
    words = ["-u", "-m", f"tests.programs.{program}", str(output), str(steps)]
    # To fork one that has imported torch takes longer than most of these programs.
    warm = warm_python("torch") if program in WITH_TORCH else warm_python("safetensors.numpy", "msgspec")
    ended = warm.run(words, environment=os.environ, timeout_seconds=HANG_SECONDS)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_every_program_resumes_by_itself_and_ends_with_the_same_state(tmp_path: Path) -> None:
    ends = set()
    for program in ALL:
        whole = uninterrupted(program, tmp_path / program, 20)
        parts = [uninterrupted(program, tmp_path / f"{program}-in-parts", steps) for steps in (12, 20)]
        assert parts[1][0] == "resumed 12", program
        assert parts[1][-1] == whole[-1], program
        ends.add(whole[-1])
    assert len(ends) == 1


def test_a_program_resumes_from_the_snapshot_of_its_end(tmp_path: Path) -> None:
    lives = Lives(program="one_file_replaced", folder=tmp_path, seed=0)
    lives.whole(10)
    assert lives.whole(20) == digest_of(uninterrupted("one_file_replaced", tmp_path / "alone", 20))
    assert lives.resumed == [0, 10]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A save that a kill cuts short: what holds of the output directory when the program is killed.

    `ended_before`: an earlier life came to its end. `snapshot_first`: this one is killed after its first snapshot.
    `late_agent`: the agent looks seconds after the kill.
    """

    program: str
    holds: Callable[[Path], bool]
    ended_before: bool = False
    snapshot_first: bool = False
    late_agent: bool = False
    command: tuple[str, ...] = (sys.executable,)


def only_first(folders: str, first: str, second: str) -> Callable[[Path], bool]:
    """Whether the newest folder has the first of its two files, whole, and not the second."""

    def holds(output: Path) -> bool:
        folder = newest(output, folders)
        return folder is not None and zipfile.is_zipfile(folder / first) and not (folder / second).exists()

    return holds


def one_shard_is_new(output: Path) -> bool:
    first, second = (output / name for name in SHARDS)
    return zipfile.is_zipfile(first) and first.stat().st_mtime_ns > second.stat().st_mtime_ns


def one_piece_is_written(output: Path) -> bool:
    return 0 < (output / "state.msgpack").stat().st_size <= PIECE_BYTES


CUTS = {
    "a-file-is-missing-in-the-first-life": Cut(
        program="keeps_two", holds=only_first("ckpt-*", "optimizer.pt", "model.pt")
    ),
    "a-file-is-missing-in-a-later-life": Cut(
        program="keeps_two", ended_before=True, holds=only_first("ckpt-*", "optimizer.pt", "model.pt")
    ),
    "a-file-is-missing-after-a-snapshot": Cut(
        program="keeps_two", snapshot_first=True, holds=only_first("ckpt-*", "optimizer.pt", "model.pt")
    ),
    "a-rank-is-missing": Cut(
        program="two_ranks", snapshot_first=True, holds=only_first("step-*", "rank0.pt", "rank1.pt")
    ),
    "files-of-two-saves-are-there": Cut(program="bin_shards", ended_before=True, holds=one_shard_is_new),
    "a-link-leads-to-it": Cut(program="latest_link", holds=lambda output: (output / "latest").is_symlink()),
    "a-file-of-the-last-save-is-deleted": Cut(
        program="unknown_layout", snapshot_first=True, holds=lambda output: not (output / "state/DONE").exists()
    ),
    "the-last-save-is-deleted": Cut(
        program="keeps_one", snapshot_first=True, holds=lambda output: not (output / "ckpt-20.json").exists()
    ),
    "the-agent-looks-after-seconds": Cut(
        program="msgpack_in_place", snapshot_first=True, holds=one_piece_is_written, late_agent=True
    ),
    "a-shell-has-started-the-program": Cut(
        program="msgpack_in_place",
        snapshot_first=True,
        holds=one_piece_is_written,
        command=("sh", "-c", '"$0" "$@"; exit $?', sys.executable),
    ),
}


@pytest.mark.slow
def test_a_program_that_deletes_what_it_resumed_from_is_not_said_to_ignore_it(tmp_path: Path) -> None:
    # It takes as long to start as a program that imports torch: the agent looks before it reads.
    command = ("sh", "-c", 'sleep 2; exec "$0" "$@"', sys.executable)
    lives = Lives(program="keeps_one", folder=tmp_path, seed=0, command=command)
    lives.whole(10)
    lives.whole(20)
    assert lives.resumed == [0, 10]
    assert "the program read none" not in lives.log


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CUTS)
def test_a_save_that_a_kill_cut_short_is_no_part_of_the_snapshot(name: str, tmp_path: Path) -> None:
    cut = CUTS[name]
    lives = Lives(program=cut.program, folder=tmp_path, seed=0, command=cut.command)
    if cut.ended_before:
        lives.whole(BEFORE)
    lives.killed_when(STEPS, cut.holds, snapshot_first=cut.snapshot_first, late_agent=cut.late_agent)
    assert lives.whole(STEPS) == digest_of(uninterrupted(cut.program, tmp_path / "alone", STEPS))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_program_whose_disk_is_lost_resumes_from_a_complete_save(tmp_path: Path) -> None:
    live_and_die_together(QUICK, tmp_path, QUICK_ROUNDS)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("group", PROGRAMS)
def test_a_program_resumes_from_a_complete_save_after_many_kills(group: str, tmp_path: Path) -> None:
    live_and_die_together(PROGRAMS[group], tmp_path, ROUNDS)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("program", REAL_WRITERS)
def test_what_others_write_is_whole_after_many_kills(program: str, tmp_path: Path) -> None:
    pytest.importorskip(REAL_WRITERS[program])
    live_and_die(program, tmp_path / "one", ROUNDS)


def live_and_die_together(programs: Sequence[str], folder: Path, rounds: Sequence[tuple[Moment, Ending]]) -> None:
    # They mostly sleep.
    with ThreadPoolExecutor(len(programs)) as threads:
        ended = [
            threads.submit(live_and_die, program, folder / str(number), rounds)
            for number, program in enumerate(programs)
        ]
    errors = [error for one in ended if isinstance(error := one.exception(), Exception)]
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {len(ended)} programs", errors)


def live_and_die(program: str, folder: Path, rounds: Sequence[tuple[Moment, Ending]], seed: int = 0) -> None:
    folder.mkdir()
    lives = Lives(program=program, folder=folder, seed=seed)
    if program in RESTLESS:
        lives.pace, lives.held_seconds = RESTLESS_PACE, RESTLESS_HELD_SECONDS
    for moment, ending in rounds:
        lives.killed(ENDLESS_STEPS, moment, ending)
    # Whoever looks late, on a busy machine, kills it when a save of the usual pace is just over.
    lives.pace = {**lives.pace, **VERY_SLOW_WRITES}
    while not lives.torn and len(lives.resumed) < 20:
        lives.killed(ENDLESS_STEPS, Moment.BEGUN_WRITE)
    steps = [max(lives.saved) + more for more in (20, 40)]
    digests = [lives.whole(last) for last in steps]
    assert digests == [digest_of(uninterrupted(program, folder / "alone", last)) for last in steps]
    assert max(lives.resumed[: len(rounds)]) > 0, f"{program} resumed from {lives.resumed}"
    assert lives.torn, f"{program} was never killed while it saved"
    check_sent(lives.snapshots())


def check_sent(snapshots: Sequence[Snapshot]) -> None:
    """Check that each snapshot has sent the files that had changed since the one before, and no others."""
    before: Mapping[str, Mapping[str, Any]] = {}
    for snapshot in snapshots:
        files = {path: file for path, file in snapshot.files.items() if "link" not in file}
        sent = {path for path, file in files.items() if "owner" not in file}
        changed = {path for path, file in files.items() if not same(file, before.get(path))}
        renamed = {path for path in changed if any(same(files[path], other) for other in before.values())}
        assert sent == changed - renamed
        assert snapshot.objects == {place_of(files[path]) for path in sent}
        before = files


def same(file: Mapping[str, Any], other: Mapping[str, Any] | None) -> bool:
    return other is not None and all(file[key] == other[key] for key in ("modified_ns", "size", "checksums"))


def place_of(file: Mapping[str, Any]) -> str:
    """The object of its bytes: its own, or the pack of small files that it is in."""
    return f".keepstep/pack-00000-{file['pack']:05}.tar" if "pack" in file else str(file["path"])


def digest_of(lines: Sequence[str]) -> str:
    (digest,) = (line.removeprefix("done ") for line in lines if line.startswith("done "))
    return digest
