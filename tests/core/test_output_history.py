"""When a snapshot of the output directories is due, and which files are fit for it: programs on a virtual clock."""

import random
import tracemalloc
from collections.abc import Callable, Sequence

import pytest
from tests.core.played_program import LOOK_SECONDS, UNIX, Played, saves_stored

from keepstep_agent.core.mirror.output_history import Decision, OutputHistory
from keepstep_agent.core.mirror.output_scan import OutputScan, is_log
from keepstep_agent.core.model import Fingerprint


def test_many_files_that_are_written_together_take_less_than_a_kibibyte_each() -> None:
    count = 20_000
    files = {
        f"out/part-{number // 1000:03d}/sample-{number:06d}.bin": Fingerprint(
            size_bytes=240, mtime_ns=int(UNIX * 1e9) + number, inode=2**32 + number
        )
        for number in range(count)
    }
    history = OutputHistory({})
    tracemalloc.start()
    try:
        for at, scan in ((0.0, OutputScan()), (1.0, OutputScan(files=files)), (4.0, OutputScan(files=files))):
            history.note(scan, {}, at=at, unix_at=UNIX + at, lives=True)
            decision = history.decide({}, {})
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(decision.fit) == count
    assert peak_bytes / count < 1000


def test_a_snapshot_is_due_when_all_has_been_quiet_for_two_seconds(played: Played) -> None:
    played.write("out/ckpt", "1")
    played.wait(1.7)
    assert not played.taken_at
    played.wait(0.6)
    assert saves_stored(played, "out/ckpt") == 1
    played.wait(0.3)
    assert not played.decision.restless


@pytest.mark.parametrize("period_seconds", [0.3, 0.7, 1.0, 2.0])
def test_a_program_that_renames_each_save_is_stored_however_fast_it_is(played: Played, period_seconds: float) -> None:
    for number in range(1, round(60 / period_seconds)):
        played.wait(period_seconds - 0.2)
        played.replace("out/ckpt.pt", f"{number}E", seconds=0.2)
    assert (number - saves_stored(played, "out/ckpt.pt")) * period_seconds <= 15
    assert not played.end(failed=True)
    assert saves_stored(played, "out/ckpt.pt") == number


@pytest.mark.parametrize("period_seconds", [1.0, 1.5, 2.1])
def test_files_written_in_place_without_a_rest_are_stored_as_one_save(played: Played, period_seconds: float) -> None:
    for number in range(1, round(60 / period_seconds)):
        played.wait(period_seconds - 0.1)
        for name in ("model.pt", "optimizer.pt"):
            played.write(f"out/{name}", f"{number}E", seconds=0.05)
        assert len(set(played.contents.values())) <= 1
    assert (number - saves_stored(played, "out/model.pt")) * period_seconds <= 15


def test_a_file_that_proves_itself_is_stored_although_it_is_hardly_ever_at_rest(played: Played) -> None:
    for number in range(1, 60):
        played.write("out/state.pt", f"{number},{'x' * 20}E", seconds=0.5, pieces=10)
        played.wait(0.45)
        assert played.contents.get("out/state.pt", "E").endswith("E")
    assert int(played.contents["out/state.pt"].split(",")[0]) >= 45
    assert 3 <= len(played.taken_at) <= 8


def test_two_files_with_a_long_pause_between_them_are_never_mixed(played: Played) -> None:
    played.wait(3)
    for number in range(1, 40):
        played.write("out/model.pt", f"{number}E", seconds=0.3)
        played.wait(1.6)
        played.write("out/optimizer.pt", f"{number}E", seconds=0.3)
        played.wait(0.1)
        assert len(set(played.contents.values())) <= 1
    assert played.decision.waiting_since is not None
    assert played.now - played.decision.waiting_since > 60
    assert not played.end()
    assert set(played.contents.values()) == {"39E"}


def test_two_files_that_take_turns_are_never_mixed(played: Played) -> None:
    played.wait(3)
    for number in range(1, 40):
        for name in ("model.pt", "optimizer.pt"):
            played.write(f"out/{name}", f"{number}E", seconds=0.1)
            played.wait(1.2)
        assert len(set(played.contents.values())) <= 1


@pytest.mark.parametrize("step", [10, 25])
def test_ranks_whose_files_come_late_are_never_mixed(played: Played, step: int) -> None:
    played.wait(3)
    for number in range(step, 20 * step, step):
        played.write(f"out/step-{number}/rank0.pt", f"{number}E", seconds=0.4)
        played.wait(1.2)
        if number == 15 * step:
            break
        played.write(f"out/step-{number}/rank1.pt", f"{number}E", seconds=0.4)
        played.wait(0.2)
    played.end(failed=True)
    for path in played.contents:
        other = path.replace("rank0", "rank1") if "rank0" in path else path.replace("rank1", "rank0")
        assert other in played.contents


def test_ranks_that_seem_to_save_by_themselves_are_not_taken_for_saves(played: Played) -> None:
    played.wait(3)
    for number in range(5, 100, 5):
        for rank in (0, 1):
            played.write(f"out/step-{number}/rank{rank}.pt", f"{number}E", seconds=0.1)
            played.wait(1.2)
            assert number <= 10 or rank == 1 or f"out/step-{number}/rank0.pt" not in played.contents
        if number == 60:
            break
    assert "out/step-40/rank1.pt" in played.contents
    played.write("out/step-65/rank0.pt", "65E", seconds=0.1)
    assert "out/step-65/rank0.pt" in played.end(failed=True)


def test_a_state_that_is_written_in_place_and_shows_no_end_is_stored_when_it_rests(played: Played) -> None:
    for number in range(1, 20):
        played.write("out/state.bin", f"{number}", seconds=0.4, pieces=4)
        played.wait(2.2 if number % 4 == 0 else 0.4)
    assert played.contents["out/state.bin"] in {str(number) for number in range(4, 20, 4)}


def test_a_closed_file_that_shows_no_end_is_whole_while_its_program_lives() -> None:
    played = Played()
    for number in range(1, 40):
        played.write("out/state.bin", f"{number},", seconds=0.3, pieces=3)
        played.wait(1.2)
    assert 39 - saves_stored(played, "out/state.bin") <= 10
    played.open("out/state.bin")
    assert played.end(failed=True) == {"out/state.bin"}


@pytest.mark.parametrize("best", [0.0, 0.3])
@pytest.mark.parametrize("period_seconds", [0.8, 1.4, 2.5])
def test_many_small_files_that_are_rewritten_in_place_all_the_time_are_stored_and_never_mixed(
    period_seconds: float, best: float
) -> None:
    played = Played(knows_processes=True)
    chance = random.Random(1)
    saved_at = [0.0]
    while played.now < 60:
        for name in ("last", "best") if chance.random() < best else ("last",):
            for part in range(6):
                played.write(f"out/{name}/{part}/model", f"{len(saved_at)}", seconds=0.03)
        saved_at.append(played.now)
        played.wait(period_seconds * chance.uniform(0.8, 1.2) - 0.2)
        for name in ("last", "best"):
            assert len({saved for path, saved in played.contents.items() if name in path}) <= 1
        newest = int(played.contents.get("out/last/0/model", "0"))
        assert played.now - (saved_at[newest + 1 :] or [played.now])[0] <= 15


def test_a_file_whose_writer_may_have_been_killed_must_have_been_closed_for_longer() -> None:
    played = Played(knows_processes=True)
    played.write("out/model", "1")
    # A rank was killed, and its launcher lives on.
    played.all_live_since = 0.3
    played.wait(0.75)
    assert played.decision.left_out["out/model"] == "it was being written to"
    played.wait(0.5)
    assert played.decision.left_out["out/model"] == "files that belong to it may be missing"


def test_a_log_of_any_name_neither_delays_a_save_nor_is_waited_for(played: Played) -> None:
    for number in range(1, 30):
        for _ in range(10):
            played.append("out/metrics.csv", f"line {number}\n")
            played.wait(0.4)
        played.write("out/ckpt.pt", f"{number}E", seconds=0.2)
    assert 29 - saves_stored(played, "out/ckpt.pt") <= 3
    assert played.contents["out/metrics.csv"].startswith("line 1\n")
    assert not played.end(failed=True)


def test_a_file_that_is_held_open_and_grows_slowly_is_a_log_after_a_while(played: Played) -> None:
    for number in range(1, 120):
        played.append("out/console", f"line {number}\n", close=False)
        played.wait(0.5)
        if number % 20 == 0:
            played.write("out/ckpt", f"{number}", seconds=0.1)
    assert saves_stored(played, "out/ckpt") >= 100
    assert "out/console" in played.contents


def test_the_lines_of_the_run_itself_are_a_log_whatever_their_file_is_called() -> None:
    played = Played(history=OutputHistory({}, log_inodes=frozenset({1})))
    for number in range(1, 60):
        played.append("out/console.txt", f"line {number}\n", close=False)
        played.wait(0.2)
        if number % 20 == 0:
            played.write("out/ckpt", f"{number}", seconds=0.1)
    assert saves_stored(played, "out/ckpt") >= 20
    assert len(played.taken_at) <= 2


def test_a_small_state_that_is_rewritten_all_the_time_is_never_taken_for_a_log(played: Played) -> None:
    for number in range(1, 200):
        played.write("out/state.bin", f"{number}" * 30 + "!", seconds=0.9, pieces=9)
        played.wait(0.1)
        assert played.contents.get("out/state.bin", "!").endswith("!")


@pytest.mark.parametrize("knows_open", [True, False])
def test_a_status_file_that_is_never_at_rest_keeps_no_save_from_being_stored(knows_open: bool) -> None:
    played = Played(knows_open=knows_open)
    for step in range(1, 120):
        played.write("out/status", f"step {step // 20} of many, {step} s", keep_open=step % 2 == 0)
        if step % 20 == 0:
            played.write("out/model.bin", f"model {step}")
            played.write("out/optim.bin", f"optim {step}")
        played.wait(0.5)
    assert len(played.taken_at) >= 3
    assert played.contents["out/model.bin"] == "model 100"
    assert played.contents["out/optim.bin"] == "optim 100"


def test_a_part_of_a_save_that_is_rewritten_with_each_of_its_files_goes_with_them(played: Played) -> None:
    for save in range(1, 6):
        for shard in range(6):
            played.write(f"out/shard-{shard}.bin", f"{save}", seconds=0.5, pieces=2)
            played.write("out/index", f"{save}/{shard}")
            played.wait(0.5)
        played.wait(5)
        found = {content.partition("/")[0] for content in played.contents.values()}
        assert found == {str(save)}


def test_a_database_is_stored_although_it_is_never_quiet_and_delays_nothing(played: Played) -> None:
    for number in range(1, 60):
        played.append("out/study.db", f"{number}", close=False)
        played.wait(0.5)
        if number % 10 == 0:
            played.write("out/ckpt", f"{number}", seconds=0.1)
    assert saves_stored(played, "out/ckpt") >= 40
    assert len(played.contents["out/study.db"]) > 40


def test_a_kill_within_a_save_leaves_the_save_before(played: Played) -> None:
    for number in (1, 2):
        for name in ("model.pt", "optimizer.pt"):
            played.write(f"out/{name}", f"{number}E", seconds=0.2)
        played.wait(12)
    played.write("out/model.pt", "3E", seconds=0.2)
    assert played.end(failed=True) == {"out/model.pt"}
    assert set(played.contents.values()) == {"2E"}


def test_a_kill_just_after_a_save_loses_nothing_that_is_proven(played: Played) -> None:
    for number in (1, 2):
        for name in ("model.pt", "optimizer.pt"):
            played.write(f"out/{name}", f"{number}E", seconds=0.2)
        played.wait(12 if number == 1 else 0.1)
    assert not played.end(failed=True)
    assert set(played.contents.values()) == {"2E"}


def test_a_program_that_ended_well_has_finished_all_that_is_not_broken(played: Played) -> None:
    played.write("out/model", "1", seconds=0.1)
    played.write("out/half.pt", "1", seconds=0.1)
    assert played.end() == {"out/half.pt"}
    assert played.contents == {"out/model": "1"}


def test_a_folder_that_was_renamed_is_whole_with_all_that_is_in_it(played: Played) -> None:
    for number in (1, 2):
        for name in ("a", "b"):
            played.write(f"out/tmp/{name}", f"{number}", seconds=0.3)
        # Of this one no look has shown anything yet.
        played.write("out/tmp/late", f"{number}")
        for name in ("a", "b", "late"):
            played.files[f"out/{number}/{name}"] = played.files.pop(f"out/tmp/{name}")
        if number == 1:
            played.wait(13)
    assert not played.end(failed=True)
    assert {path for path in played.contents if path.startswith("out/2/")} == {"out/2/a", "out/2/b", "out/2/late"}


def test_files_that_are_renamed_one_by_one_go_together_all_the_same(played: Played) -> None:
    """As the chunks of an array, which lie in place and each of which is replaced."""
    for number in range(1, 20):
        for name in ("chunk-0", "chunk-1", "chunk-2"):
            played.replace(f"out/{name}", f"{number}", seconds=0.1)
            assert len(set(played.contents.values())) <= 1
        played.wait(1.5)
    played.replace("out/chunk-0", "20", seconds=0.1)
    assert played.end(failed=True) == {"out/chunk-0", "out/chunk-1", "out/chunk-2"}
    (stored,) = set(played.contents.values())
    assert 13 <= int(stored) <= 19


def test_the_first_save_of_all_survives_a_kill_if_it_was_renamed(played: Played) -> None:
    played.replace("out/ckpt.pt", "1E", seconds=0.3)
    assert not played.end(failed=True)
    assert played.contents == {"out/ckpt.pt": "1E"}


def test_files_with_hashes_in_their_names_go_with_their_marker(played: Played) -> None:
    for number in range(1, 4):
        for _ in range(5 - number):
            name = f"{number * 7919:032x}"
            played.write(f"out/step-{number}/data/{name}", f"{number}", seconds=0.1)
        played.write(f"out/step-{number}/INDEX", f"{number}", seconds=0.1)
        played.wait(4)
    assert f"out/step-{3}/INDEX" in played.contents
    played.write(f"out/step-4/data/{4 * 7919:032x}", "4", seconds=0.1)
    assert played.end(failed=True)
    assert not any("step-4" in path for path in played.contents)


def test_a_program_that_deletes_its_saves_before_they_are_stored_is_stored_all_the_same(played: Played) -> None:
    for number in range(1, 30):
        for name in ("a.pt", "b.pt"):
            played.write(f"out/step-{number}/{name}", f"{number}E", seconds=0.1)
        played.wait(1.3)
        if number > 1:
            for name in ("a.pt", "b.pt"):
                played.delete(f"out/step-{number - 1}/{name}")
    assert max(int(path.split("/")[1].removeprefix("step-")) for path in played.contents) >= 20


def test_a_save_with_fewer_files_than_before_is_stored_a_little_later(played: Played) -> None:
    for name in ("a", "b"):
        played.write(f"out/step-1/{name}", "1", seconds=0.1)
    played.wait(13)
    played.write("out/step-2/a", "2", seconds=0.1)
    played.wait(5)
    assert "out/step-2/a" not in played.contents
    assert played.decision.left_out == {"out/step-2/a": "files that belong to it may be missing"}
    played.wait(6)
    assert played.contents["out/step-2/a"] == "2"


def test_a_deletion_and_another_link_are_changes_too(played: Played) -> None:
    played.write("out/a", "1")
    played.write("out/b", "1")
    played.wait(13)
    played.delete("out/a")
    played.wait(3)
    assert set(played.contents) == {"out/b"}


def test_no_snapshot_is_due_for_a_deletion_while_something_is_left_out(played: Played) -> None:
    """As seen with timm: it would be no news, and the next one would have to wait."""
    played.write("out/old", "1")
    played.wait(13)
    played.write("out/last.pt", "1E")
    played.wait(13)
    played.delete("out/old")
    for number in range(20):
        played.write("out/last.pt", f"{number}")
        played.wait(0.5)
        assert not played.decision.due
    played.write("out/last.pt", "2E")
    played.wait(3)
    assert played.contents == {"out/last.pt": "2E"}


def test_a_file_that_was_deleted_a_moment_ago_may_have_a_successor() -> None:
    played = Played()
    played.write("out/ckpt-1", "1")
    played.wait(13)
    played.delete("out/ckpt-1")
    played.wait(1)
    assert played.decision.deleted == {"out/ckpt-1"}
    played.wait(2)
    assert not played.decision.deleted


def test_logs_alone_are_data_and_beside_anything_else_they_are_not(played: Played) -> None:
    played.append("out/state.jsonl", "1\n")
    played.wait(3)
    assert "out/state.jsonl" in played.contents
    assert is_log("out/state.jsonl")
    played.write("out/ckpt", "1")
    played.wait(13)
    taken = list(played.taken_at)
    played.append("out/state.jsonl", "2\n")
    played.wait(13)
    assert played.taken_at == taken


def test_what_was_stored_and_is_no_more_is_due_again() -> None:
    played = Played()
    played.write("out/a", "1")
    played.wait(13)
    played.stored = {}
    played.wait(0.3)
    assert "out/a" in played.stored


def together(decision: Decision, paths: Sequence[str]) -> set[int | None]:
    return {decision.together.get(path) for path in paths}


def test_files_of_one_group_are_pinned_together_and_a_database_with_its_log() -> None:
    played = Played()
    for name in ("a", "b"):
        played.write(f"out/{name}", "1")
    played.wait(5)
    played.write("out/c", "1")
    played.append("out/x.db", "1")
    played.wait(1)
    assert len(together(played.decision, ["out/c"])) == 1
    assert played.decision.together["out/c"] != played.decision.together["out/x.db"]


def test_names_that_cannot_be_stored_are_told_and_make_nothing_due() -> None:
    played = Played()
    played.write("out/a\nb", "1")
    played.wait(30)
    assert "control character" in played.decision.left_out["out/a\nb"]
    assert not played.decision.due
    assert not played.decision.restless


def renamed(played: Played, number: int) -> None:
    played.replace("out/ckpt.pt", f"{number}E", seconds=0.2)


def in_place(played: Played, number: int) -> None:
    played.write("out/ckpt.pt", f"{number}E", seconds=0.2)


def without_an_end(played: Played, number: int) -> None:
    played.write("out/ckpt", f"{number}", seconds=0.2)


def two_in_place(played: Played, number: int) -> None:
    for name in ("model.pt", "optimizer.pt"):
        played.write(f"out/{name}", f"{number}E", seconds=0.1)


def two_renamed(played: Played, number: int) -> None:
    for name in ("model.pt", "optimizer.pt"):
        played.replace(f"out/{name}", f"{number}E", seconds=0.1)


def folders(played: Played, number: int) -> None:
    for name in ("a.pt", "b.pt", "c.pt"):
        played.write(f"out/step-{number}/{name}", f"{number}E", seconds=0.07)


def numbered(played: Played, number: int) -> None:
    played.write(f"out/step-{number}.pt", f"{number}E", seconds=0.2)


SAVES = (renamed, in_place, without_an_end, two_in_place, two_renamed, folders, numbered)


@pytest.mark.parametrize(
    ("save", "period_seconds"),
    [
        (save, period_seconds)
        for save in SAVES
        for period_seconds in (1.0, 2.0, 3.0, 5.0, 12.0)
        # Nothing tells that such a file is whole which is neither quiet nor, for long enough, closed.
        if save is not without_an_end or period_seconds > 2
    ],
)
def test_what_was_whole_15_seconds_before_all_is_lost_is_stored(
    save: Callable[[Played, int], None], period_seconds: float, played: Played
) -> None:
    chance = random.Random(f"{save.__name__} {period_seconds}")
    saved_at: list[float] = []
    while played.now < 80:
        until = played.now + period_seconds * chance.uniform(0.8, 1.2) - 0.2
        while played.now < until:
            played.wait(min(LOOK_SECONDS, until - played.now))
            must_be_stored = sum(at <= played.now - 15 for at in saved_at)
            assert max([0, *(saves_stored(played, path) for path in played.contents)]) >= must_be_stored
        save(played, len(saved_at) + 1)
        saved_at.append(played.now)


def test_the_inode_of_a_deleted_file_makes_no_new_file_a_renamed_one(played: Played) -> None:
    """Filesystems give it to the next one at once."""
    played.write("out/step-3/state.bin", "3" * 52)
    played.wait(13)
    inode = played.files["out/step-3/state.bin"].inode
    played.delete("out/step-3/state.bin")
    played.write("out/step-4/state.bin", "4" * 20, keep_open=True)
    played.files["out/step-4/state.bin"].inode = inode
    assert played.end(failed=True) == {"out/step-4/state.bin"}
    assert set(played.contents) == {"out/step-3/state.bin"}


def test_a_lock_that_a_look_has_shown_is_no_part_of_a_save(played: Played) -> None:
    for number in range(1, 4):
        played.write("out/ckpt.lock", "", seconds=0.3 if number == 2 else 0.0)
        played.delete("out/ckpt.lock")
        for name in ("a.pt", "b.pt"):
            played.write(f"out/{name}", f"{number}E", seconds=0.2)
        played.wait(12 if number < 3 else 0.1)
    assert not played.end(failed=True)
    assert set(played.contents.values()) == {"3E"}


def test_names_with_signs_in_place_of_numbers_are_of_other_kinds(played: Played) -> None:
    for number in range(1, 4):
        for name in ("C#.bin", "C1.bin", "C*.bin"):
            played.write(f"out/{name}", f"{number}", seconds=0.1)
        played.wait(12)
    assert set(played.contents.values()) == {"3"}


def test_a_program_that_never_rests_is_remembered_for_a_minute() -> None:
    played = Played()
    for number in range(1, 250):
        played.write(f"out/step-{number}.pt", f"{number}E", seconds=0.1)
        played.wait(0.9)
        if number > 3:
            played.delete(f"out/step-{number - 3}.pt")
    assert len([*played.history._past_writes, *played.history._last_writes]) < 80


def test_what_could_not_be_read_or_is_gone_with_its_directory_was_not_deleted() -> None:
    seen = Fingerprint(size_bytes=1, mtime_ns=1, inode=1)
    stored = {"out/a/x": seen, "logs/y": seen}
    history = OutputHistory(stored)
    scan = OutputScan(problems={"out/a": "it cannot be read"}, missing=frozenset({"logs"}))
    for at in (100.0, 110.0):
        history.note(scan, {}, at=at, unix_at=UNIX, lives=True)
        assert not history.decide(stored, {"logs/latest": "y"}).due
    history.note(OutputScan(missing=frozenset({"logs"})), {}, at=120.0, unix_at=UNIX, lives=True)
    assert history.decide(stored, {}).restless
