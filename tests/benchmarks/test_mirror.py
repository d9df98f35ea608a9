"""The benchmarks of snapshots, as small as they can be: they assert what must hold on any machine."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.beside_sync import Scenario, compare
from benchmarks.mirror_costs import (
    QUICK,
    STAGED_GOAL,
    added_one_at_a_time,
    fast_saver,
    idle_watch,
    rewritten_in_place,
    store,
)
from benchmarks.mirror_overhead import WAYS, one_turn
from benchmarks.saving_program import SIZES, TornError, content_of, load
from benchmarks.sync_contestants import loops

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(1200)]
needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None or not Path("/usr/include/openssl/ssl.h").exists(),
    reason="no C compiler or no headers of OpenSSL",
)
MOST_SENT_BESIDES_BYTES = 50_000
"""Manifest, marker, reservation, and the heads of all requests of a snapshot."""


@needs_compiler
def test_an_added_checkpoint_costs_its_own_bytes_whatever_lies_beside_it(short_directory: Path) -> None:
    scenario = replace(QUICK, added=1)
    with store(short_directory) as server:
        added = added_one_at_a_time(short_directory / "added", server, scenario)
    most_bytes = scenario.checkpoint_bytes * 1.05 + MOST_SENT_BESIDES_BYTES
    assert all(scenario.checkpoint_bytes <= one.used.received_bytes <= most_bytes for one in added)
    # To check and to send, and nothing of the others.
    assert all(one.used.read_bytes <= 2 * most_bytes for one in added)


@needs_compiler
def test_a_file_rewritten_in_place_is_sent_once_for_each_save(short_directory: Path) -> None:
    scenario = replace(QUICK, saves=1)
    with store(short_directory) as server:
        (snapshot,) = rewritten_in_place(short_directory / "in-place", server, scenario)
    assert snapshot.used.received_bytes <= scenario.in_place_bytes * 1.05 + MOST_SENT_BESIDES_BYTES


@needs_compiler
def test_an_idle_watch_looks_seldom(short_directory: Path) -> None:
    with store(short_directory) as server:
        idle = idle_watch(short_directory, server, QUICK)
    # Each ten seconds, and twice at the edges. Four times as much, as caches are cold after ten seconds.
    looks = idle.seconds / 10 + 2
    assert idle.watch_cpu_seconds < 4 * looks * idle.look_cpu_seconds + 0.1


def test_no_kill_leaves_a_torn_checkpoint_with_keepstep(short_directory: Path) -> None:
    scenario = Scenario(
        kills=4, at_once=2, write_seconds=1.0, train_seconds=5.0, shortest_seconds=8.0, longest_seconds=16.0
    )
    results = compare(short_directory, scenario, rivals=[])
    assert [result.contestant for result in results] == ["Keepstep, machine killed", "Keepstep, program killed"]
    assert [result.torn for result in results] == [[], []]
    assert all(len(result.outcomes) == scenario.kills and result.sent_bytes for result in results)


def test_a_loop_that_syncs_brings_back_what_it_has_stored(short_directory: Path) -> None:
    scenario = Scenario(kills=1, at_once=1, shortest_seconds=29.0, longest_seconds=30.0)
    (rclone,) = (loop for loop in loops(interval_seconds=1.0) if loop.name.startswith("rclone"))
    *_, result = compare(short_directory, scenario, rivals=[rclone])
    (outcome,) = result.outcomes
    assert outcome.restored or outcome.torn
    assert result.sent_bytes


@pytest.mark.parametrize("way", list(WAYS))
def test_each_way_to_run_counts_steps(way: str, short_directory: Path) -> None:
    turn = one_turn(short_directory / "turn", WAYS[way], seconds=1.0)
    assert turn.steps
    assert turn.seconds >= 1.0


def test_the_check_finds_every_cut_and_every_mix(tmp_path: Path) -> None:
    assert load(tmp_path) == 0
    for name in SIZES:
        (tmp_path / name).write_bytes(content_of(name, 1))
    assert load(tmp_path) == 1
    for name in SIZES:
        whole = content_of(name, 1)
        for other in (
            content_of(name, 2),
            whole[:-10],
            b"",
            whole[: len(whole) // 2] + content_of(name, 2)[len(whole) // 2 :],
        ):
            (tmp_path / name).write_bytes(other)
            with pytest.raises(TornError):
                load(tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(TornError):
            load(tmp_path)
        (tmp_path / name).write_bytes(whole)


def test_a_program_that_saves_faster_than_its_store_takes_it_holds_one_save_on_the_volume(
    short_directory: Path,
) -> None:
    fast = fast_saver(short_directory / "fast", QUICK)
    assert fast.staged_bytes <= QUICK.fast_bytes * STAGED_GOAL
    assert fast.snapshots < fast.saves
    assert fast.warnings
