"""What reading all runs again and again costs: requests by what is new, memory by the number of runs alone."""

import os
import subprocess
import sys

import pytest
from tests.console.conftest import NOW, Opener
from tests.console.many_runs import BEGAN_AT, ManyRuns
from tests.console.stored_runs import interrupted_run, long_run, marker_of, run_objects
from tests.core.noted_lives import NotedLife
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.console import refresh
from keepstep_agent.console.refresh import Runs
from keepstep_agent.console.settings import ConsoleSettings
from keepstep_agent.core.policies.run_overview import RunStanding, overview_of
from keepstep_agent.core.stored.ledger import encode_life
from keepstep_agent.core.stored.object_layout import damage_key, ledger_key

RUNS = 100
MOST_KIB = 150 * 1024


async def test_a_round_lists_each_running_run_twice_and_reads_only_what_is_new() -> None:
    store = ManyRuns(RUNS, 20)
    last_at = BEGAN_AT + 20 * 600.0
    runs = Runs(store, ConsoleSettings(destination="s3://bucket/runs"), clock=lambda: last_at + 60.0)
    await runs.read_all()
    assert len(runs.known) == RUNS
    # Each folder is looked into once, its weights and its damage are listed, and its newest marker and ledger are read.
    assert store.calls == {"list_folders": 2 + RUNS, "list": 5 * RUNS, "get": 2 * RUNS}
    store.calls.clear()
    await runs.read_all()
    assert store.calls == {"list_folders": 2, "list": 2 * RUNS}

    life = NotedLife("agent-2")
    life.save(last_at + 30, last_at + 31, 9900)
    folder = store.folders[7]
    for key, body in (marker_of(9900, at=last_at + 40), (ledger_key("job", last_at + 40, "a"), encode_life(life.life))):
        store.own[folder + key] = body, last_at + 40
    store.calls.clear()
    await runs.read_all()
    assert store.calls == {"list_folders": 2, "list": 2 * RUNS + 2, "get": 2}
    overview = runs.known[folder.removesuffix("/")].overview
    assert overview is not None
    assert overview.recovery is not None
    assert overview.recovery.step == 9900


async def test_a_page_asks_the_store_for_nothing(console: Opener) -> None:
    opened = await console()
    opened.put("one/", interrupted_run())
    await opened.runs.read_all()
    opened.store.calls.clear()
    for address in ("/", "/?q=one&sort=goodput", "/run?name=one", "/api/runs", "/api/run?name=one"):
        assert (await opened.get(address))[0] == 200
    assert opened.store.calls == []


async def test_runs_that_do_not_run_are_looked_at_less_often() -> None:
    store = ManyRuns(RUNS, 20)
    runs = Runs(store, ConsoleSettings(destination="s3://bucket/runs"), clock=lambda: BEGAN_AT + 3600.0 * 24 * 60)
    await runs.read_all()
    store.calls.clear()
    rounds = max(refresh._ROUNDS.values())
    for _ in range(rounds):
        await runs.read_all()
    assert store.calls["list"] == 2 * RUNS
    assert {run.overview.standing(BEGAN_AT + 3600.0 * 24 * 60, 1.0) for run in runs.known.values() if run.overview} == {
        RunStanding.ABANDONED
    }


@pytest.mark.nightly
@pytest.mark.slow
def test_a_console_of_500_runs_of_200_checkpoints_stays_below_150_mib() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.console.many_runs", "500", "200"],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < MOST_KIB


async def test_a_run_that_is_deleted_is_no_longer_shown_and_a_new_one_is(console: Opener) -> None:
    opened = await console()
    opened.put("one/", long_run(3, began_at=NOW - 1860))
    opened.put("two/", long_run(3, began_at=NOW - 1860))
    await opened.runs.read_all()
    for key in [key for key in opened.store.objects if key.startswith("one/")]:
        del opened.store.objects[key]
    opened.put("three/", interrupted_run())
    await opened.runs.read_all()
    assert list(opened.runs.known) == ["three", "two"]


async def test_a_checkpoint_that_a_restore_found_damaged_is_no_recovery_point(console: Opener) -> None:
    opened = await console()
    opened.put("one/", long_run(3, began_at=NOW - 1860))
    await opened.runs.read_all()
    assert (await opened.get("/run?name=one"))[1].count("<td>committed</td>") == 3
    life = NotedLife("agent-2")
    life.start(NOW)
    opened.put("one/", {damage_key("save-300"): (b"model.pt is wrong", NOW), **run_objects([life.life])})
    await opened.runs.read_all()
    overview = opened.runs.known["one"].overview
    assert overview is not None
    assert overview.recovery is not None
    assert overview.recovery.step == 200
    assert "<td>damaged</td>" in (await opened.get("/run?name=one"))[1]
    # As `keepstep verify` does when it finds every byte right.
    del opened.store.objects["one/" + damage_key("save-300")]
    await opened.runs.read_all()
    assert (await opened.get("/run?name=one"))[1].count("<td>committed</td>") == 3


async def test_what_nobody_foresaw_of_one_run_hides_no_other(console: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = await console()
    opened.put("one/", interrupted_run())
    opened.put("two/", interrupted_run())

    def once_wrong(*given: object, **options: object) -> object:
        monkeypatch.setattr("keepstep_agent.console.refresh.overview_of", overview_of)
        raise OverflowError("a number that no test had")

    monkeypatch.setattr("keepstep_agent.console.refresh.overview_of", once_wrong)
    await opened.runs.read_all()
    assert sorted(bool(run.error) for run in opened.runs.known.values()) == [False, True]
    _, page, _ = await opened.get("/")
    assert "because of a bug in Keepstep" in page
    await opened.runs.read_all()
    assert [run.error for run in opened.runs.known.values()] == ["", ""]


async def test_forgotten_ledgers_are_read_again_when_something_changes(
    console: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refresh, "MOST_KEPT_BYTES", 0)
    opened = await console()
    opened.put("one/", long_run(3, began_at=NOW - 1860))
    await opened.runs.read_all()
    opened.store.calls.clear()
    await opened.runs.read_all()
    assert [call for call in opened.store.calls if call[0] == "get"] == []
    # A marker alone: its step is known from it, and all else from the ledger.
    opened.put("one/", run_objects(steps={900: NOW - 10}))
    await opened.runs.read_all()
    overview = opened.runs.known["one"].overview
    assert overview is not None
    assert overview.time is not None
    assert overview.recovery is not None
    assert (overview.recovery.step, overview.time.committed) == (900, 3)


async def test_a_marker_that_cannot_be_read_costs_what_it_alone_says(console: Opener) -> None:
    opened = await console()
    opened.put("one/", interrupted_run())
    marker = min(key for key in opened.store.objects if "/commits/" in key)
    opened.store.objects[marker].body = b"garbage"
    await opened.runs.read_all()
    run = opened.runs.known["one"]
    assert run.overview is not None
    assert run.overview.recovery is not None
    assert (run.error, run.overview.recovery.step, run.overview.recovery.kind) == ("", 720, "just-in-time")


async def test_the_store_that_refuses_a_part_of_the_ledger_is_told_on_the_page(console: Opener) -> None:
    opened = await console()
    opened.put("one/", interrupted_run())
    opened.put("one/", {ledger_key("job", 3.0, "garbage"): (b"garbage", 3.0)})
    await opened.runs.read_all()
    _, page, _ = await opened.get("/run?name=one")
    assert "1 object of the ledger cannot be read" in page
    assert "72.6%" in page
