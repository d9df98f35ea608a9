"""Real writers write; the watch reports each complete checkpoint once, and an incomplete one never."""

import asyncio
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from structlog.testing import capture_logs

from mooring_agent.adapters.volume import directory_hints, directory_scan
from mooring_agent.adapters.volume.directory_scan import DirectoryScanner
from mooring_agent.adapters.volume.staging_watch import FoundCheckpoint, StagingWatch, WatchIntervals, signature_of
from mooring_agent.core.limits import STEP
from mooring_agent.core.watch.checkpoint_layouts import DirectorySnapshot, Proof

INTERVALS = WatchIntervals(quiet_seconds=0.15, busy_interval_seconds=0.03, idle_interval_seconds=0.3)
BOUND_SECONDS = 60.0

Open = Callable[..., StagingWatch]


@pytest.fixture
async def open_watch(tmp_path: Path) -> AsyncIterator[Open]:
    opened: list[StagingWatch] = []
    with ThreadPoolExecutor(1) as executor:

        def open_one(
            directory: Path | None = None, intervals: WatchIntervals = INTERVALS, **options: object
        ) -> StagingWatch:
            opened.append(
                StagingWatch(tmp_path, directory or tmp_path, executor=executor, intervals=intervals, **options)  # type: ignore[arg-type]
            )
            return opened[-1]

        yield open_one
        for watch in opened:
            watch.close()


async def _next(watch: StagingWatch) -> FoundCheckpoint:
    async with asyncio.timeout(BOUND_SECONDS):
        return await anext(watch)


async def _nothing_until_canary(watch: StagingWatch, directory: Path) -> None:
    """A checkpoint written later is reported first, though what is judged incomplete was quiet for longer."""
    canary = directory / "canary-99.pt"
    # Long enough that everything older has been judged in its quiet state.
    async with asyncio.timeout(BOUND_SECONDS):
        looking = asyncio.ensure_future(anext(watch))
        await asyncio.wait({looking}, timeout=2 * INTERVALS.quiet_seconds + 2 * INTERVALS.busy_interval_seconds)
        _save(canary)
        assert (await looking).path == str(canary)
    canary.unlink()


def _save(path: Path, value: int = 1) -> None:
    torch.save({"weights": torch.full((100,), value)}, path)


def _truncated(path: Path, size_bytes: int) -> None:
    os.truncate(path, size_bytes)


async def test_a_scan_that_takes_long_is_followed_by_a_longer_rest(
    tmp_path: Path, open_watch: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the shortest time between two scans is judged, which a busy machine makes longer."""
    scan, scans = DirectoryScanner.scan, list[tuple[float, float]]()

    def scan_slowly(self: DirectoryScanner, seen_at: float) -> list[DirectorySnapshot]:
        began = time.monotonic()
        while time.monotonic() < began + INTERVALS.busy_interval_seconds:
            found = scan(self, seen_at)
        scans.append((began, time.monotonic()))
        return found

    monkeypatch.setattr(DirectoryScanner, "scan", scan_slowly)
    _save(tmp_path / "step_20.pt")
    await _next(open_watch())
    gaps = [began - ended for (_, ended), (began, _) in pairwise(scans)]
    assert min(gaps) > 5 * INTERVALS.busy_interval_seconds


async def test_torch_save_files_are_found_with_name_and_step(tmp_path: Path, open_watch: Open) -> None:
    _save(tmp_path / "step_20.pt")
    found = await _next(open_watch())
    assert (found.path, found.name, found.step) == (str(tmp_path / "step_20.pt"), "step_20.pt", 20)
    assert found.signature == signature_of(tmp_path, tmp_path / "step_20.pt")


async def test_a_file_overwritten_in_place_is_found_again_and_its_step_counted(
    tmp_path: Path, open_watch: Open
) -> None:
    watch = open_watch(newest_step=41)
    for step in (42, 43, 44):
        _save(tmp_path / "latest.pt", step)
        found = await _next(watch)
        assert (found.name, found.step) == ("latest.pt", step)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
async def test_no_truncation_of_a_single_file_is_reported(tmp_path: Path, open_watch: Open, suffix: str) -> None:
    whole = tmp_path / f"whole-1.{suffix}"
    if suffix == "pt":
        _save(whole)
    else:
        whole.write_bytes(_safetensors())
    content = whole.read_bytes()
    end = len(content)
    sizes = {0, 1, 7, 8, 9, end // 2, end - 22, end - 1, *range(50, end, 97)}
    for number, size_bytes in enumerate(sizes):
        (tmp_path / f"cut-{number}.{suffix}").write_bytes(content[:size_bytes])
    watch = open_watch()
    assert (await _next(watch)).path == str(whole)
    await _nothing_until_canary(watch, tmp_path)


def _safetensors() -> bytes:
    header = json.dumps(
        {"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}
    ).encode()
    return len(header).to_bytes(8, "little") + header + bytes(256)


async def test_an_old_pickle_that_shows_no_end_is_left_alone(tmp_path: Path, open_watch: Open) -> None:
    torch.save({"step": 1}, tmp_path / "old-1.pt", _use_new_zipfile_serialization=False)
    await _nothing_until_canary(open_watch(), tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning")
async def test_a_distributed_checkpoint_is_found_when_its_metadata_is_there(tmp_path: Path, open_watch: Open) -> None:
    dcp.save({"weights": torch.ones(1000)}, checkpoint_id=tmp_path / "step-5", no_dist=True)
    metadata = tmp_path / "step-5" / ".metadata"
    kept = metadata.read_bytes()
    metadata.unlink()
    watch = open_watch()
    await _nothing_until_canary(watch, tmp_path)
    metadata.write_bytes(kept)
    found = await _next(watch)
    assert (found.name, found.step) == ("step-5", 5)
    # Overwriting the same id: the old metadata must not vouch for the new data.
    data = tmp_path / "step-5" / "__0_0.distcp"
    stamp = metadata.stat().st_mtime_ns + 1
    os.utime(data, ns=(stamp, stamp))
    await _nothing_until_canary(watch, tmp_path)
    dcp.save({"weights": torch.zeros(1000)}, checkpoint_id=tmp_path / "step-5", no_dist=True)
    assert (await _next(watch)).path == str(tmp_path / "step-5")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
async def test_a_distributed_checkpoint_of_which_a_part_lies_elsewhere_is_left_alone(
    tmp_path: Path, open_watch: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where the metadata is larger than what is read at a time.
    monkeypatch.setattr(directory_scan, "_READ_BYTES", 16)
    dcp.save({"weights": torch.ones(1000)}, checkpoint_id=tmp_path / "step-5", no_dist=True)
    part = tmp_path / "step-5" / "__0_0.distcp"
    kept = part.read_bytes()
    part.rename(part.with_name("__1_0.distcp"))
    watch = open_watch()
    await _nothing_until_canary(watch, tmp_path)
    part.write_bytes(kept)
    (tmp_path / "step-5" / ".metadata").touch()
    assert (await _next(watch)).path == str(tmp_path / "step-5")


def _write_hugging_face(folder: Path, *, ranks: int) -> None:
    """Everything that rank 0 writes, in its order; the other ranks' RNG states are the test's to add."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.partial").write_bytes(_safetensors())
    (folder / "model.safetensors.partial").rename(folder / "model.safetensors")
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt"):
        _save(folder / name)
    _save(folder / ("rng_state.pth" if ranks == 1 else "rng_state_0.pth"))
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 1}))


async def test_hugging_face_of_one_rank_is_found_after_its_last_file(tmp_path: Path, open_watch: Open) -> None:
    folder = tmp_path / "checkpoint-100"
    _write_hugging_face(folder, ranks=1)
    state = (folder / "trainer_state.json").read_bytes()
    _truncated(folder / "trainer_state.json", 5)
    watch = open_watch()
    await _nothing_until_canary(watch, tmp_path)
    (folder / "trainer_state.json").write_bytes(state)
    found = await _next(watch)
    assert (found.name, found.step) == ("checkpoint-100", 100)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "training_args.bin", "rng_state.pth"])
async def test_a_truncated_file_keeps_a_hugging_face_checkpoint_back(
    tmp_path: Path, open_watch: Open, name: str
) -> None:
    folder = tmp_path / "checkpoint-100"
    _write_hugging_face(folder, ranks=1)
    _truncated(folder / name, (folder / name).stat().st_size - 1)
    await _nothing_until_canary(open_watch(), tmp_path)


async def test_hugging_face_of_two_ranks_waits_for_the_slower_one(tmp_path: Path, open_watch: Open) -> None:
    folder = tmp_path / "checkpoint-100"
    _write_hugging_face(folder, ranks=2)
    watch = open_watch(world_size=2)
    await _nothing_until_canary(watch, tmp_path)
    _save(folder / "rng_state_1.pth")
    assert (await _next(watch)).path == str(folder)


async def test_one_pods_ranks_are_never_taken_for_all_of_them(
    tmp_path: Path, open_watch: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first of two pods, each with a volume of its own: it shows a whole checkpoint of a smaller job, each time."""
    told, untold = open_watch(world_size=4), open_watch()
    for step in (100, 200, 300):
        _write_hugging_face(tmp_path / f"checkpoint-{step}", ranks=4)
        _save(tmp_path / f"checkpoint-{step}" / "rng_state_1.pth")
    await _nothing_until_canary(told, tmp_path)
    assert "rng_state_2.pth is not written yet" in capsys.readouterr().out
    await _nothing_until_canary(untold, tmp_path)
    assert await _last_names(untold, writers_gone=True) == []
    warning = next(line for line in capsys.readouterr().out.splitlines() if "warning" in line)
    assert "checkpoint_not_complete" in warning
    assert "set world_size" in warning


async def test_orbax_is_found_when_it_takes_its_final_name(tmp_path: Path, open_watch: Open) -> None:
    temporary = tmp_path / "12.orbax-checkpoint-tmp"
    (temporary / "default").mkdir(parents=True)
    (temporary / "_CHECKPOINT_METADATA").write_text("{}")
    (temporary / "default" / "manifest.ocdbt").write_bytes(b"ocdbt")
    watch = open_watch()
    await _nothing_until_canary(watch, tmp_path)
    temporary.rename(tmp_path / "12")
    found = await _next(watch)
    assert (found.path, found.step) == (str(tmp_path / "12"), 12)


async def test_known_content_is_not_reported(tmp_path: Path, open_watch: Open) -> None:
    _save(tmp_path / "step_1.pt")
    _save(tmp_path / "step_2.pt")
    known = signature_of(tmp_path, tmp_path / "step_1.pt")
    announced = signature_of(tmp_path, tmp_path / "step_2.pt")
    assert known
    assert announced
    watch = open_watch(known=[known])
    watch.add_known(announced)
    await _nothing_until_canary(watch, tmp_path)


async def test_a_directory_that_appears_later_and_one_that_is_replaced_are_followed(
    tmp_path: Path, open_watch: Open
) -> None:
    directory = tmp_path / "checkpoints"
    watch = open_watch(directory)
    looking = asyncio.ensure_future(_next(watch))
    await asyncio.wait({looking}, timeout=0.1)
    directory.mkdir()
    _save(directory / "step_1.pt")
    assert (await looking).step == 1
    directory.rename(tmp_path / "moved")
    directory.mkdir()
    _save(directory / "step_2.pt")
    assert (await _next(watch)).step == 2
    shutil.rmtree(directory)
    directory.mkdir()
    _save(directory / "step_3.pt")
    assert (await _next(watch)).step == 3


async def test_an_event_wakes_an_idle_watch_long_before_its_next_poll(tmp_path: Path, open_watch: Open) -> None:
    watch = open_watch(
        intervals=WatchIntervals(quiet_seconds=0.1, busy_interval_seconds=0.03, idle_interval_seconds=600.0)
    )
    _save(tmp_path / "step_1.pt")
    assert (await _next(watch)).step == 1
    looking = asyncio.ensure_future(_next(watch))
    await asyncio.wait({looking}, timeout=0.3)
    _save(tmp_path / "step_2.pt")
    assert (await looking).step == 2


async def test_without_events_polling_alone_finds_everything_and_one_line_says_so(
    tmp_path: Path, open_watch: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    class RefusingObserver:
        def schedule(self, *_arguments: object, **_options: object) -> None:
            raise OSError(24, "inotify instance limit reached")

    monkeypatch.setattr(directory_hints, "Observer", RefusingObserver)
    watch = open_watch()
    with capture_logs() as logs:
        for step in (1, 2, 3):
            _save(tmp_path / f"step_{step}.pt")
            assert (await _next(watch)).step == step
    assert sum(entry["event"] == "watch.events_unavailable" for entry in logs) == 1


async def test_checkpoints_that_vanish_while_being_looked_at_do_no_harm(tmp_path: Path, open_watch: Open) -> None:
    watch = open_watch()
    stop = asyncio.Event()

    def rotate(number: int) -> None:
        folder = tmp_path / f"checkpoint-{number}"
        _write_hugging_face(folder, ranks=1)
        shutil.rmtree(folder)

    async def keep_rotating() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            await asyncio.to_thread(rotate, number)

    rotating = asyncio.ensure_future(keep_rotating())
    _save(tmp_path / "stays-7.pt")
    assert (await _next(watch)).step == 7
    stop.set()
    await rotating


async def test_what_is_kept_back_is_said_once(tmp_path: Path, open_watch: Open) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "weights.pt").write_bytes(b"PK\3\4 half")
    watch = open_watch()
    with capture_logs() as logs:
        await _nothing_until_canary(watch, tmp_path)
    lines = [entry for entry in logs if entry["event"] == "checkpoint_not_complete"]
    assert [line["why"] for line in lines if line["path"].endswith("notes")] == ["weights.pt is cut short"]


async def test_nothing_is_said_of_what_somebody_announces(tmp_path: Path, open_watch: Open) -> None:
    for name in ("announced-1", "other-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state").write_text("of no known layout")
    asked: list[tuple[str, int | None]] = []

    def spoken_for(path: str, step: int | None) -> bool:
        asked.append((path, step))
        return path.endswith("announced-1")

    watch = open_watch(spoken_for=spoken_for)
    with capture_logs() as logs:
        await _nothing_until_canary(watch, tmp_path)
    said = [entry["path"] for entry in logs if entry["event"] == "checkpoint_not_complete"]
    assert said == [str(tmp_path / "other-2")]
    assert sorted(asked) == [(str(tmp_path / "announced-1"), 1), (str(tmp_path / "other-2"), 2)]


def test_links_are_no_candidates_and_are_not_followed_out(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    (directory / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    (directory / "latest").symlink_to(directory / "checkpoint-1")
    (directory / "checkpoint-1" / "out").symlink_to(tmp_path / "elsewhere")
    (snapshot,) = DirectoryScanner(tmp_path, directory).scan(0.0)
    assert (snapshot.name, snapshot.files) == ("checkpoint-1", ())


def test_an_unchanged_file_is_proven_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path / "step_1.pt")
    scanner = DirectoryScanner(tmp_path, tmp_path)
    (first,) = scanner.scan(0.0)

    def fail(*_arguments: object) -> Proof:
        raise AssertionError("read again")

    monkeypatch.setattr("mooring_agent.adapters.volume.directory_scan._prove", fail)
    (second,) = scanner.scan(1.0)
    assert first.files == second.files
    assert first.files[0].proof is Proof.WHOLE


async def test_the_last_look_reports_what_is_complete_at_once_and_nothing_twice(
    tmp_path: Path, open_watch: Open
) -> None:
    _save(tmp_path / "step_10.pt")
    watch = open_watch(intervals=WatchIntervals(quiet_seconds=600.0))
    _save(tmp_path / "step_20.pt")
    _truncated(tmp_path / "step_20.pt", 100)
    _write_hugging_face(tmp_path / "checkpoint-30", ranks=1)
    assert await _last_names(watch, writers_gone=True) == ["checkpoint-30", "step_10.pt"]
    assert await _last_names(watch, writers_gone=True) == []


async def test_the_last_look_takes_what_several_ranks_left_when_it_is_known_how_many_they_are(
    tmp_path: Path, open_watch: Open
) -> None:
    def write(step: int) -> None:
        _write_hugging_face(tmp_path / f"checkpoint-{step}", ranks=2)
        _save(tmp_path / f"checkpoint-{step}" / "rng_state_1.pth")

    write(10)
    write(20)
    # They may be of three ranks, of which the last was killed, or is in another pod.
    for world_size in (0, 1, 3):
        assert await _last_names(open_watch(world_size=world_size), writers_gone=True) == []
    assert await _last_names(open_watch(world_size=2), writers_gone=True) == ["checkpoint-10", "checkpoint-20"]


async def _last_names(watch: StagingWatch, *, writers_gone: bool, limit_seconds: float = 0.0) -> list[str]:
    async with asyncio.timeout(BOUND_SECONDS):
        looks = watch.last_looks(writers_gone=writers_gone, limit_seconds=limit_seconds)
        return sorted([found.name async for found in looks])


async def test_the_last_looks_wait_for_quiet_while_somebody_may_be_writing(tmp_path: Path, open_watch: Open) -> None:
    _save(tmp_path / "step_10.pt")
    assert await _last_names(open_watch(), writers_gone=False, limit_seconds=BOUND_SECONDS) == ["step_10.pt"]


async def test_the_last_looks_end_in_time_and_without_what_was_not_quiet(tmp_path: Path, open_watch: Open) -> None:
    _save(tmp_path / "step_10.pt")
    watch = open_watch(intervals=WatchIntervals(quiet_seconds=600.0, busy_interval_seconds=0.03))
    assert await _last_names(watch, writers_gone=False, limit_seconds=0.1) == []
    assert await _last_names(watch, writers_gone=False, limit_seconds=-5.0) == []


async def test_a_file_that_trips_its_parser_is_broken_and_hides_no_other(tmp_path: Path, open_watch: Open) -> None:
    deep = b"[" * 100_000
    (tmp_path / "deep-1.safetensors").write_bytes(len(deep).to_bytes(8, "little") + deep)
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_bytes(deep)
    _save(tmp_path / "step_2.pt")
    assert (await _next(open_watch())).name == "step_2.pt"


async def test_a_number_too_large_for_a_step_is_none(tmp_path: Path, open_watch: Open) -> None:
    largest = STEP
    _save(tmp_path / f"step_{largest + 1}.pt")
    assert (await _next(open_watch(newest_step=6))).step == 7
    assert (await _next(open_watch(newest_step=largest))).step == largest
