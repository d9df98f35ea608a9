"""The rendezvous of ranks, also beside the keys of earlier starts. Ranks are threads on torch's own store."""

import json
import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch.distributed as distributed
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS

from keepstep.errors import ErrorKind, RanksError, StoreLostError
from keepstep.ranks import coordinator, rank_store
from keepstep.ranks.coordinator import StoreCoordinator
from keepstep.ranks.rank_store import KeyStore, Ranks, RankStore
from keepstep.ranks.rank_watch import RankWatch
from keepstep.ranks.rendezvous import rendezvous


def start(store: KeyStore, volumes: Sequence[str], locks: Sequence[str] = ()) -> list[tuple[str, Ranks, object]]:
    """All ranks of one start of the job, on those volumes, with those locks there."""
    met: dict[int, tuple[str, Ranks, object]] = {}

    def rank(number: int) -> None:
        ranks = Ranks(rank=number, world_size=len(volumes))
        met[number] = rendezvous(RankStore(store, ranks), volumes[number], *locks[number : number + 1])

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(len(volumes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive(), "a rank hangs"
    return [met[number] for number in range(len(volumes))]


def test_ranks_learn_one_nonce_and_who_shares_their_volume() -> None:
    met = start(distributed.HashStore(), ["a", "b", "a", "b", "c"])
    assert len({nonce for nonce, *_ in met}) == 1
    assert [ranks.pod for _, ranks, _ in met] == [(0, 2), (1, 3), (0, 2), (1, 3), (4,)]
    assert [ranks.local_world_size for _, ranks, _ in met] == [2, 2, 2, 2, 1]
    assert [ranks.leads_pod for _, ranks, _ in met] == [True, True, False, False, True]


def test_ranks_learn_who_holds_which_lock_in_their_volume() -> None:
    met = start(distributed.HashStore(), ["a", "b", "a", "a"], ["0", "0", "1", ""])
    assert [others for _, _, others in met] == [{2: "1"}, {}, {0: "0"}, {0: "0", 2: "1"}]


def test_a_restart_in_the_same_store_meets_under_another_nonce() -> None:
    store = distributed.HashStore()
    nonces = [start(store, ["a", "a"])[1][0] for _ in range(20)]
    assert len(set(nonces)) == 20


def test_nobody_takes_an_earlier_starts_hello_for_a_rank_that_has_come() -> None:
    store = distributed.HashStore()
    start(store, ["a", "a"])
    with pytest.raises(StoreLostError, match="not all 2 ranks"):
        rendezvous(RankStore(store, Ranks(rank=0, world_size=2)), "a", seconds=0.2)
    with pytest.raises(StoreLostError, match="not all 2 ranks"):
        rendezvous(RankStore(store, Ranks(rank=1, world_size=2)), "a", seconds=0.2)
    assert len({nonce for nonce, *_ in start(store, ["a", "a"])}) == 1


def jobs(world_size: int, watch: RankWatch | None = None) -> list[StoreCoordinator]:
    store = distributed.HashStore()
    places = [Ranks(rank=rank, world_size=world_size) for rank in range(world_size)]
    return [StoreCoordinator(RankStore(store, place, watch=watch)) for place in places]


class Watch(RankWatch):
    """What the test says that a process sees."""

    def __init__(self, *gone: int, notice_seconds: float | None = None) -> None:
        super().__init__({}, others=1, notice_seconds=lambda _: notice_seconds)
        self.those = list(gone)

    def gone(self) -> Sequence[int]:
        return self.those


def test_a_rank_that_waited_too_long_and_the_one_that_came_later_have_the_same_answer() -> None:
    early, late = jobs(2)
    assert early.agree("question", seconds=0.05) is None
    assert late.agree("question", seconds=HANG_SECONDS) is None
    assert late.agree("another", ok=False) is False
    assert early.agree("another", seconds=HANG_SECONDS) is False


def test_who_says_no_need_not_wait_for_the_others() -> None:
    assert jobs(2)[0].agree("question", ok=False, seconds=3600.0) is False


def test_the_first_rank_stays_until_the_others_have_read_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = jobs(2)
    may_read, has_closed = threading.Event(), threading.Event()
    chosen = []
    set_if_absent = RankStore.set_if_absent

    def settle_late(store: RankStore, key: str, value: str) -> str:
        assert store.ranks.rank == 0 or may_read.wait(HANG_SECONDS)
        return set_if_absent(store, key, value)

    monkeypatch.setattr(RankStore, "set_if_absent", settle_late)
    monkeypatch.setattr(coordinator, "_READ_SECONDS", HANG_SECONDS)

    def begin_and_end(one: StoreCoordinator) -> None:
        chosen.append(one.choose_newest("resume", [(1, "a")]))
        one.close()
        if one is first:
            has_closed.set()

    threads = [threading.Thread(target=begin_and_end, args=(one,), daemon=True) for one in (first, second)]
    for thread in threads:
        thread.start()
    wait_until(lambda: bool(chosen), HANG_SECONDS, "the first rank has chosen")
    assert not has_closed.wait(0.2)
    may_read.set()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert has_closed.is_set()
    assert chosen == [(1, "a")] * 2


def test_an_answer_that_was_read_stands_though_the_store_ends_then(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = jobs(2)
    first.arrive("question")

    def ended(_: RankStore, *_keys: str) -> None:
        raise StoreLostError(RuntimeError("connection closed"))

    monkeypatch.setattr(RankStore, "forget", ended)
    assert second.agree("question", seconds=HANG_SECONDS) is True


def test_values_are_compared() -> None:
    answers: list[bool] = []
    first, second = jobs(2)

    def ask(one: StoreCoordinator, key: str, value: str) -> None:
        answers.append(one.same(key, value))

    for values in (("8", "8"), ("8", "10")):
        threads = [
            threading.Thread(target=ask, args=(one, json.dumps(values), value), daemon=True)
            for one, value in zip((first, second), values, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_SECONDS)
    assert answers == [True, True, False, False]


def test_what_all_bring_comes_to_the_first_rank_and_is_not_kept_in_the_store() -> None:
    store = distributed.HashStore()
    first, second = (StoreCoordinator(RankStore(store, Ranks(rank=rank, world_size=2))) for rank in (0, 1))
    before = store.num_keys()
    assert second.gather("states", "b") is None
    assert first.gather("states", "a") == ["a", "b"]
    assert store.num_keys() == before


def test_what_not_all_bring_is_waited_for_in_vain_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "PATIENCE_SECONDS", 0.05)
    assert jobs(2)[0].gather("states", "a") is None


def test_the_store_holds_no_more_after_a_thousand_agreements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_store, "_SHORTEST_LOOK_SECONDS", 0.001)
    store, held = distributed.HashStore(), []
    members = [StoreCoordinator(RankStore(store, Ranks(rank=rank, world_size=3))) for rank in range(3)]
    together = threading.Barrier(3, action=lambda: held.append(store.num_keys()))

    def rank(one: StoreCoordinator) -> None:
        for number in range(1000):
            assert one.agree(f"{number}/yes", seconds=HANG_SECONDS)
            assert one.agree(f"{number}/no", ok=one.ranks.rank != number % 3, seconds=HANG_SECONDS) is False
            assert one.same(f"{number}/same", "8")
            assert not one.same(f"{number}/different", str(one.ranks.rank))
            assert one.choose_newest(f"{number}/newest", [(number, "a"), (number + 1, "b")]) == (number + 1, "b")
            if one.ranks.rank != number % 3:
                one.arrive(f"{number}/ended")
            else:
                assert one.agree(f"{number}/ended", seconds=HANG_SECONDS)
            together.wait(HANG_SECONDS)

    threads = [threading.Thread(target=rank, args=(one,), daemon=True) for one in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert len(held) == 1000
    assert set(held) == {3}, "where each rank was last"


def test_ranks_that_do_not_come_to_choose_are_named_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "PATIENCE_SECONDS", 0.05)
    first, second, third = jobs(3)
    with pytest.raises(RanksError, match=r"ranks 1, 2 did not come within 0 s to name") as raised:
        first.choose_newest("resume", [(1, "a")])
    assert raised.value.kind is ErrorKind.RANKS_LATE
    for late in (second, third):
        with pytest.raises(RanksError, match=r"ranks 1, 2 did not come"):
            late.choose_newest("resume", [(1, "a")])


def test_a_rank_that_no_agreement_saw_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    first, second, _ = jobs(3)
    assert first.agree("question", seconds=0.05) is None
    assert "waited_for=ranks 1, 2" in caplog.text
    assert second.agree("question", seconds=HANG_SECONDS) is None


def test_a_rank_that_is_gone_ends_an_agreement_for_all(caplog: pytest.LogCaptureFixture) -> None:
    first, second, _ = jobs(3, Watch(2))
    assert first.agree("question", seconds=HANG_SECONDS) is None
    assert second.agree("question", seconds=HANG_SECONDS) is None
    assert caplog.text.count("a rank is gone and not waited for: about=question ended=rank 2") == 2


def test_a_rank_that_is_gone_has_come_to_what_it_came_to_last() -> None:
    first, second, third = jobs(3, Watch(2))
    third.arrive("question")
    answers: list[bool | None] = []
    waiting = threading.Thread(target=lambda: answers.append(first.agree("question", seconds=HANG_SECONDS)))
    waiting.start()
    assert second.agree("question", seconds=HANG_SECONDS) is True
    waiting.join(HANG_SECONDS)
    assert answers == [True]


def test_what_all_ranks_agreed_on_stands_though_one_is_gone_since() -> None:
    watch = Watch()
    first, second = jobs(2, watch)
    first.arrive("question")
    second.arrive("question")
    second.arrive("another")
    watch.those = [1]
    assert first.agree("another", seconds=HANG_SECONDS) is True


def test_a_rank_that_is_gone_ends_the_choice_of_a_checkpoint_for_all_and_is_named() -> None:
    first, second, _ = jobs(3, Watch(2))
    for rank in (second, first):
        with pytest.raises(RanksError, match="rank 2 left and did not name the checkpoints"):
            rank.choose_newest("resume", [(1, "a")])


def test_what_a_rank_that_is_gone_does_not_bring_is_not_waited_for() -> None:
    assert jobs(2, Watch(1))[0].gather("states", "a") is None


def test_the_first_rank_does_not_stay_for_ranks_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "_READ_SECONDS", 3600.0)
    first, _ = jobs(2, Watch(1))
    assert first.agree("question", ok=False) is False
    first.close()


def test_a_notice_ends_a_wait_and_all_ranks_have_the_same_answer(caplog: pytest.LogCaptureFixture) -> None:
    first, second = jobs(2, Watch(notice_seconds=0.05))
    assert first.agree("question", seconds=3600.0) is None
    assert second.agree("question", seconds=3600.0) is None
    assert caplog.text.count("not all ranks came in time: about=question seconds=0 waited_for=rank 1") == 2


def test_a_notice_ends_the_wait_for_ranks_that_do_not_come_to_the_start_of_the_job() -> None:
    store = RankStore(distributed.HashStore(), Ranks(rank=0, world_size=2), watch=Watch(notice_seconds=0.05))
    with pytest.raises(StoreLostError, match="not all 2 ranks came within 0 s, there is no sign of rank 1"):
        rendezvous(store, "a", seconds=3600.0)


def test_who_has_not_come_to_the_start_of_the_job_is_named() -> None:
    store = RankStore(distributed.HashStore(), Ranks(rank=1, world_size=20))
    with pytest.raises(StoreLostError, match=r"no sign of ranks 0, 2, 3, 4, 5, 6, 7, 8 and 11 more"):
        rendezvous(store, "a", seconds=0.05)


@pytest.mark.parametrize(("lines", "answer"), [("abcdefgh", True), ("abbbbbbb", None)], ids=["moves", "stands still"])
def test_a_rank_is_waited_for_as_long_as_it_says_something_new(
    lines: str, answer: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank comes after eight looks, each a second after the last; none may bring nothing new for four."""
    seconds = iter(range(1000))
    monkeypatch.setattr(coordinator, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    monkeypatch.setattr(coordinator, "_LOOK_SECONDS", 0.0)
    first, second = jobs(2)
    said = iter(lines)
    read = RankStore.read

    def look(store: RankStore, key: str) -> str | None:
        if key == "far":
            line = next(said, None)
            if line is None:
                second.agree("here", seconds=0.0)
            return line
        return read(store, key)

    monkeypatch.setattr(RankStore, "read", look)
    assert first.agree("here", seconds=4.0, progress="far") is answer
