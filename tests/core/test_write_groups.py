"""Which files are of one save, as far as pauses and names tell."""

import time
from collections.abc import Iterator

import pytest
from tests.core.played_program import Played, saves_stored

from keepstep_agent.core.mirror.output_history import OutputHistory
from keepstep_agent.core.mirror.write_groups import Write, groups, saves_by_name


def test_the_first_save_after_a_snapshot_of_two_is_stored_although_the_program_never_rests() -> None:
    """As seen with litgpt: all files of the last snapshot seemed to be one save."""
    before = list(saves_by_name(f"out/step-{step}/{name}" for step in (10, 20) for name in ("model", "config")))
    played = Played(history=OutputHistory({}, before))
    for step in range(3, 14):
        for name in ("model", "config"):
            played.write(f"out/step-{step}0/{name}", str(step), seconds=0.05)
        played.wait(1.2)
    assert {"out/step-30/model", "out/step-30/config"} <= played.contents.keys()


@pytest.mark.parametrize(
    ("paths", "saves"),
    [
        (["out/step-1/a", "out/step-1/b", "out/step-2/b", "out/step-2/a"], 2),
        (["out/step-20/shard-0", "out/step-20/shard-1", "out/step-30/shard-0", "out/step-30/shard-1"], 2),
        (["out/model-00001-of-00002", "out/model-00002-of-00002", "out/index"], 1),
        (["out/ckpt-1", "out/ckpt-2", "out/ckpt-3"], 3),
        (["out/run-1/epoch=1-step=100", "out/run-1/epoch=2-step=200"], 2),
        (["out/run-1/state-1", "out/run-1/state-2"], 1),
        (["out/CKPT+2026-11-28+13-00-01+00/a", "out/CKPT+2026-11-28+13-00-02+00/a"], 2),
        (["out/a", "out/b", "out/a", "out/b"], 2),
    ],
)
def test_names_tell_saves_apart_and_in_doubt_they_are_one(paths: list[str], saves: int) -> None:
    assert len(list(saves_by_name(paths))) == saves


@pytest.mark.parametrize("rest_seconds", [5.0, 30.0])
@pytest.mark.parametrize(("gap_seconds", "write_seconds"), [(0.6, 2.0), (0.6, 4.0), (1.5, 1.0), (1.5, 4.0)])
@pytest.mark.parametrize(
    "name",
    [
        "out/step-{step}/shard-{shard}",
        "out/step-{step}/rank-{shard}/state",
        "out/checkpoint-{step}-rank-{shard}",
        "out/model-0000{shard}-of-00004",
        "out/{step}/model-0000{shard}-of-00004",
    ],
)
def test_half_a_save_is_never_stored_however_long_it_takes(
    played: Played, name: str, gap_seconds: float, write_seconds: float, rest_seconds: float
) -> None:
    """A large model is gathered before each shard, so a save has pauses in it."""
    for step in (10, 20, 30):
        paths = [name.format(step=step, shard=shard) for shard in range(1, 5)]
        for path in paths:
            played.write(path, f"{step}" * 16, seconds=write_seconds, pieces=16)
            assert len({played.contents.get(one) for one in paths}) == 1
            played.wait(gap_seconds)
        for _ in range(4):
            played.wait(rest_seconds / 4)
            assert len({played.contents.get(one) for one in paths}) == 1
        assert played.contents[paths[0]] == f"{step}" * 16


def test_what_a_program_writes_before_its_first_save_keeps_no_save_out(played: Played) -> None:
    """As seen with Ultralytics, which writes its arguments longer before its first save than it rests after one."""
    played.write("out/args", "x")
    played.wait(1.6)
    while played.now < 30:
        for name in ("last", "best"):
            played.write(f"out/weights/{name}.pt", f"{played.now:.0f}E", seconds=0.05)
        played.wait(1.2)
    assert len(played.taken_at) > 1
    assert saves_stored(played, "out/weights/last.pt") == saves_stored(played, "out/weights/best.pt") > 15


@pytest.mark.parametrize("period_seconds", [0.8, 1.3, 2.0])
@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("out/step-{step}0", ["/model", "/config"]),
        ("out/logs/version_0/epoch={step}-step={step}0", [".ckpt"]),
        ("out/CKPT+2026-11-28+13-{minute:02}-{second:02}+00", ["/model", "/counter", "/list"]),
        ("out/ckpt-{step}", ["-rank-0", "-rank-1"]),
    ],
)
def test_saves_with_new_names_are_stored_however_fast_they_are(
    played: Played, name: str, files: list[str], period_seconds: float
) -> None:
    saved_at: list[float] = []
    newest = 0
    while played.now < 60:
        minute, second = divmod(int(played.now), 60)
        here = name.format(step=len(saved_at) + 1, minute=minute, second=second)
        for file in files:
            played.write(f"{here}{file}", f"{len(saved_at)}", seconds=0.05)
        saved_at.append(played.now)
        played.wait(period_seconds - 0.05 * len(files))
        stored = list(played.contents.values())
        assert all(stored.count(content) == len(files) for content in stored)
        newest = max(map(int, stored), default=-1)
        assert newest + 1 == len(saved_at) or played.now - saved_at[newest + 1] < 11
    assert newest > 0


def test_links_to_what_was_just_written_are_in_any_order() -> None:
    """As seen with timm: a checkpoint is a second name of the last one, and half of them were held back."""
    names = (["last"], ["last", "best"], ["last"], ["best", "last"], ["last"])
    writes = [
        Write(path=f"out/{name}", begun_at=1.1 * number, ended_at=1.1 * number + 0.1)
        for number in range(10)
        for name in names[number % len(names)]
    ]
    found = groups(writes)
    assert len(found) == 10
    assert all(group.is_regular for group in found)


def test_a_save_that_begins_with_another_file_than_the_first_one_is_not_told_from_half_of_two() -> None:
    order = ("model", "optimizer")
    writes = [
        Write(path=f"out/{name}", begun_at=number * 1.2 + place * 0.1, ended_at=number * 1.2 + place * 0.1 + 0.05)
        for number in range(8)
        for place, name in enumerate(order if number < 4 else reversed(order))
    ]
    assert [group.is_regular for group in groups(writes)] == [True] * 4 + [False] * 4


def test_saves_are_told_as_they_end_so_that_those_of_many_files_are_not_kept() -> None:
    read: list[int] = []

    def paths() -> Iterator[str]:
        for number in range(1000):
            read.append(number)
            yield f"out/sample-{number:06d}.bin"

    saves = saves_by_name(paths())
    while len(read) < 1000:
        assert next(saves)
    assert sum(1 for _ in saves) <= 1


def test_twenty_times_as_many_names_take_no_four_hundred_times_as_long() -> None:
    def cpu_seconds(count: int) -> float:
        began = time.process_time()
        for _ in saves_by_name(f"out/part-{number // 1000}/sample-{number:06d}.bin" for number in range(count)):
            pass
        return time.process_time() - began

    few = min(cpu_seconds(2_000) for _ in range(3))
    assert cpu_seconds(40_000) < 60 * few
