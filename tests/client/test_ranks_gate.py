"""The gate of several ranks: one position for all, whoever had the notice. Ranks are threads on torch's own store."""

import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch.distributed as distributed
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS

import keepstep.gate.gates
import keepstep.ranks.rank_store
from keepstep.gate import Action, RanksGate
from keepstep.gate.sigterm import Sigterm
from keepstep.ranks.rank_store import Ranks, RankStore
from keepstep.ranks.rank_watch import RankWatch
from keepstep_api import signal_file


def request_save(path: Path, number: int) -> None:
    content = signal_file.encode(signal_file.SaveSignal(number=number, deadline_unix=0.0, terminating=False))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o660)
    os.pwrite(descriptor, content, 0)
    os.close(descriptor)


class Gates(list[RanksGate]):
    """The gates of those ranks that came."""

    def __init__(self, tmp_path: Path, world_size: int, signal_path: str) -> None:
        super().__init__()
        self._folder = tmp_path
        self._signal_file = signal_path
        self._world_size = world_size
        self._shared = distributed.HashStore()
        self._sigterms: list[Sigterm] = []

    def come(self, rank: int) -> None:
        self._sigterms.append(Sigterm())
        store = RankStore(self._shared, Ranks(rank=rank, world_size=self._world_size))
        self.append(RanksGate(self._folder / self._signal_file.format(rank), self._sigterms[-1], store))

    def close(self) -> None:
        for gate in reversed(self):
            gate.close()
        for sigterm in reversed(self._sigterms):
            sigterm.close()


@contextmanager
def gates(
    tmp_path: Path, world_size: int, *, absent: frozenset[int] = frozenset(), signal_path: str = "signal-{}"
) -> Iterator[Gates]:
    made = Gates(tmp_path, world_size, signal_path)
    try:
        for rank in range(world_size):
            if rank not in absent:
                made.come(rank)
        yield made
    finally:
        made.close()


def train(
    gate: RanksGate,
    *,
    until: int | None = None,
    before: Callable[[int], None] = lambda step: None,
    number: Callable[[int], Any] = int,
) -> list[tuple[int, Action]]:
    """Everything that was asked, by step; ends at STOP."""
    asked: list[tuple[int, Action]] = []
    give_up_at = time.monotonic() + HANG_SECONDS
    for step in count(1) if until is None else range(1, until):
        assert time.monotonic() < give_up_at, "it is never told to stop"
        before(step)
        ask = gate.at(number(step))
        if ask is not Action.NOTHING:
            asked.append((step, ask))
        if ask is Action.SAVE_AND_EXIT:
            break
    return asked


def run_all(functions: Sequence[Callable[[], list[tuple[int, Action]]]]) -> list[list[tuple[int, Action]]]:
    results: list[list[tuple[int, Action]]] = [[] for _ in functions]

    def call(index: int) -> None:
        results[index] = functions[index]()

    threads = [threading.Thread(target=call, args=(index,), daemon=True) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive(), "a rank hangs"
    return results


@pytest.mark.parametrize("seed", range(20))
def test_a_notice_on_any_rank_stops_all_at_the_same_step(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    world_size = chance.randint(2, 5)
    noticed, notice_step = chance.randrange(world_size), chance.randint(1, 200)
    barrier = threading.Barrier(world_size)

    with gates(tmp_path, world_size) as made:

        def rank(index: int) -> list[tuple[int, Action]]:
            def before(step: int) -> None:
                if step % 7 == 0:
                    barrier.wait(HANG_SECONDS)  # as a collective does
                if index == noticed and step == notice_step:
                    made[index].notice()

            return train(made[index], before=before)

        results = run_all([partial(rank, index) for index in range(world_size)])

    assert len({tuple(result) for result in results}) == 1, results
    ((step, ask),) = results[0]
    assert ask is Action.SAVE_AND_EXIT
    assert step >= notice_step


def test_rounds_without_all_ranks_are_off_and_the_first_with_all_stops_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keepstep.gate.gates, "_RANK_0_WAIT_SECONDS", 0.05)
    with gates(tmp_path, 3, absent=frozenset({2})) as made:
        made[1].notice()
        wait_until(lambda: caplog.text.count("did not agree") >= 8, HANG_SECONDS, "rounds are tried and called off")
        assert run_all([partial(train, gate, until=3) for gate in made[:2]]) == [[], []]
        monkeypatch.setattr(keepstep.gate.gates, "_RANK_0_WAIT_SECONDS", HANG_SECONDS)
        made.come(2)
        results = run_all([partial(train, gate) for gate in made])
    assert len({tuple(result) for result in results}) == 1, results
    assert results[0][-1][1] is Action.SAVE_AND_EXIT


def test_a_round_without_a_rank_that_is_gone_is_off_at_once_and_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RankWatch, "gone", lambda watch: [2])
    monkeypatch.setattr(keepstep.gate.gates, "_RANK_0_WAIT_SECONDS", 3600.0)
    monkeypatch.setattr(keepstep.gate.gates, "_OTHER_RANKS_WAIT_SECONDS", 3600.0)
    with gates(tmp_path, 3, absent=frozenset({2})) as made:
        made[1].notice()
        wait_until(lambda: caplog.text.count("did not agree") == 2, HANG_SECONDS, "the round is off on both")
        assert run_all([partial(train, gate, until=1000) for gate in made]) == [[], []]
    assert caplog.text.count("did not agree") == 2


def test_a_save_that_cannot_be_agreed_on_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keepstep.gate.gates, "_RANK_0_WAIT_SECONDS", 0.05)
    request_save(tmp_path / "signal-1", 0)
    with gates(tmp_path, 3, absent=frozenset({2})) as made:
        request_save(tmp_path / "signal-1", 1)
        wait_until(lambda: caplog.text.count("did not agree") == 6, HANG_SECONDS, "three tries on two ranks")
        assert run_all([partial(train, gate, until=100) for gate in made]) == [[], []]
    assert caplog.text.count("did not agree") == 6


def test_a_save_that_one_rank_requests_is_made_by_all_at_the_same_step(tmp_path: Path) -> None:
    def train_until_saved(gate: RanksGate) -> list[tuple[int, Action]]:
        give_up_at = time.monotonic() + HANG_SECONDS
        for step in count(1):
            if (action := gate.at(step)) is not Action.NOTHING or time.monotonic() > give_up_at:
                return [(step, action)]
        raise AssertionError

    with gates(tmp_path, 3) as made:
        made[0].request_save()
        first, second, third = run_all([partial(train_until_saved, gate) for gate in made])
    assert first == second == third
    assert first[0][1] is Action.SAVE


def test_a_request_in_a_file_that_only_some_have_found_yet_saves_once(tmp_path: Path) -> None:
    with gates(tmp_path, 2, signal_path="shared") as made:
        # Each looks for the file once a second, and at another moment.
        made[1]._signal_file._look_at += 0.7
        request_save(tmp_path / "shared", 1)
        barrier = threading.Barrier(2)
        enough: list[bool] = []

        def rank(index: int) -> list[tuple[int, Action]]:
            asked: list[tuple[int, Action]] = []
            enough_at = time.monotonic() + HANG_SECONDS
            for step in count(1):
                ask = made[index].at(step)
                if ask is not Action.NOTHING:
                    asked.append((step, ask))
                    # Both have looked more than once by then.
                    enough_at = time.monotonic() + 3.0
                if index == 0:
                    enough.append(time.monotonic() > enough_at)
                barrier.wait(HANG_SECONDS)
                if enough[step - 1]:
                    break
            return asked

        first, second = run_all([partial(rank, index) for index in range(2)])
    assert first == second
    assert [ask for _, ask in first] == [Action.SAVE]


def test_a_rank_that_has_ended_its_training_holds_up_nobody(tmp_path: Path) -> None:
    with gates(tmp_path, 2) as made:
        made[1].close()
        made[0].notice()
        assert train(made[0], until=1000) == []
        made[0].close()
        made[0]._thread.join(HANG_SECONDS)
        assert not made[0]._thread.is_alive()


def test_a_step_may_be_a_number_of_numpy(tmp_path: Path) -> None:
    with gates(tmp_path, 2) as made:
        made[0].notice()
        first, second = run_all([partial(train, gate, number=numpy.int64) for gate in made])
    assert first == second != []


def test_more_files_than_select_can_wait_for_are_no_trouble() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    null = os.open(os.devnull, os.O_RDONLY)
    many = [null]
    try:
        while many[-1] < 1100:
            many.append(os.dup(null))
        sigterm = Sigterm()
        sigterm.watch_from_thread()
        sigterm.wake()
        assert sigterm.wait(HANG_SECONDS) is False
        os.kill(os.getpid(), signal.SIGTERM)
        assert sigterm.wait(HANG_SECONDS) is True
        sigterm.close()
    finally:
        for descriptor in many:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_store_holds_no_more_after_a_hundred_requested_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepstep.ranks.rank_store, "_SHORTEST_LOOK_SECONDS", 0.0005)
    rounds, held = 100, []
    with gates(tmp_path, 2, signal_path="signal") as made:
        asked = threading.Barrier(2)

        def rank(index: int) -> list[tuple[int, Action]]:
            seen: list[tuple[int, Action]] = []
            step = 0
            while len(seen) < rounds:
                if asked.wait(HANG_SECONDS) == 0:
                    request_save(tmp_path / "signal", len(seen) + 1)
                    held.append(made._shared.num_keys())
                ask = Action.NOTHING
                while ask is Action.NOTHING:
                    step += 1
                    ask = made[index].at(step)
                seen.append((step, ask))
            return seen

        request_save(tmp_path / "signal", 0)
        first, second = run_all([partial(rank, index) for index in range(2)])
    assert first == second
    assert len(first) == rounds
    assert max(held) <= 16, "of two rounds at most"
