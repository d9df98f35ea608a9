"""The gate of several ranks: one position for all, whoever had the notice. Ranks are threads on torch's own store."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as distributed

import mooring.gate.ranks
from mooring.gate import Ask, RanksGate
from mooring.gate.sigterm import Sigterm
from mooring.rank_store import Ranks, RankStore

WAIT_SECONDS = 30.0


@contextmanager
def gates(tmp_path: Path, world_size: int, *, absent: frozenset[int] = frozenset()) -> Iterator[list[RanksGate]]:
    shared = distributed.HashStore()
    sigterms = [Sigterm() for _ in range(world_size)]
    made = [
        RanksGate(
            tmp_path / f"doorbell-{rank}", sigterms[rank], RankStore(shared, Ranks(rank=rank, world_size=world_size))
        )
        for rank in range(world_size)
        if rank not in absent
    ]
    try:
        yield made
    finally:
        for gate in reversed(made):
            gate.close()
        for sigterm in reversed(sigterms):
            sigterm.close()


def train(gate: RanksGate, *, until: int, before: Callable[[int], None] = lambda step: None) -> list[tuple[int, Ask]]:
    """Everything that was asked, by step; ends at STOP."""
    asked: list[tuple[int, Ask]] = []
    for step in range(1, until):
        before(step)
        ask = gate.at(step)
        if ask is not Ask.NOTHING:
            asked.append((step, ask))
        if ask is Ask.STOP:
            break
    return asked


def run_all(functions: Sequence[Callable[[], list[tuple[int, Ask]]]]) -> list[list[tuple[int, Ask]]]:
    results: list[list[tuple[int, Ask]]] = [[] for _ in functions]

    def call(index: int) -> None:
        results[index] = functions[index]()

    threads = [threading.Thread(target=call, args=(index,), daemon=True) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive(), "a rank hangs"
    return results


@pytest.mark.parametrize("seed", range(20))
def test_a_notice_on_any_rank_stops_all_at_the_same_step(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    world_size = chance.randint(2, 5)
    noticed, notice_step = chance.randrange(world_size), chance.randint(1, 200)
    barrier = threading.Barrier(world_size)

    with gates(tmp_path, world_size) as made:

        def rank(index: int) -> list[tuple[int, Ask]]:
            def before(step: int) -> None:
                if step % 7 == 0:
                    barrier.wait(WAIT_SECONDS)  # as a collective does
                if index == noticed and step == notice_step:
                    made[index].notice()

            return train(made[index], until=1_000_000, before=before)

        results = run_all([partial(rank, index) for index in range(world_size)])

    assert len({tuple(result) for result in results}) == 1, results
    ((step, ask),) = results[0]
    assert ask is Ask.STOP
    assert step >= notice_step


def test_a_round_without_all_ranks_is_called_off_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mooring.gate.ranks, "_LEADER_WAIT_SECONDS", 0.1)
    with gates(tmp_path, 3, absent=frozenset({2})) as made:
        made[1].notice()
        for gate in made:
            gate._thread.join(WAIT_SECONDS)
        assert run_all([partial(train, gate, until=100) for gate in made]) == [[], []]
    assert caplog.text.count("did not agree") == 2
