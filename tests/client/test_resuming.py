"""What ranks resume from with lazy restore. They are threads on torch's own store; agents are real servers."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from tests.client.agent_server import AgentServer, serving
from tests.harness.bounds import HANG_SECONDS

pytest.importorskip("torch", reason="PyTorch has no wheel for this Python here")
import torch.distributed as distributed

from keepstep import resuming
from keepstep.agent_client import restores
from keepstep.agent_client.client import Agent
from keepstep.checkpoints.records import Kind, Record
from keepstep.errors import ErrorKind, RanksError, RestoreError
from keepstep.ranks.coordinator import StoreCoordinator
from keepstep.ranks.rank_store import Ranks, RankStore
from keepstep_api import names
from keepstep_api.v1 import agent_pb2


class Pod(AgentServer):
    """A pod's agent: what is committed as it lists it, and what it finds damaged."""

    def __init__(self, committed: Sequence[tuple[int, str]]) -> None:
        super().__init__()
        self.committed = list(committed)
        self.damaged: set[str] = set()
        self.refuses: dict[str, grpc.StatusCode] = {}
        self.late = 0
        """How many questions it answers with "not yet"."""
        self.late_fetches = 0
        """The same, of `Fetch` for the newest it has listed."""
        self.was_asked = False
        self.brought: list[str] = []
        self.files: list[str] = []
        self.asked_for: list[list[str]] = []
        """The files of each request; none for all."""

    def ListRestorable(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        if self.late:
            self.late -= 1
            return agent_pb2.ListRestorableResponse(storage_error="the store is away")
        if self.damaged and not self.committed:
            context.abort(grpc.StatusCode.DATA_LOSS, "none can be restored")
        found = [agent_pb2.RestorableCheckpoint(step=step, save=save) for step, save in self.committed]
        return agent_pb2.ListRestorableResponse(ready=True, checkpoints=found)

    def Fetch(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self.was_asked = True
        if request.save in self.damaged:
            self.committed = [one for one in self.committed if one[1] != request.save]
            context.abort(grpc.StatusCode.DATA_LOSS, "a byte is wrong")
        if request.save in self.refuses:
            context.abort(self.refuses[request.save], "no room")
        if self.late_fetches and request.save == self.committed[0][1]:
            self.late_fetches -= 1
            return agent_pb2.FetchResponse(done_bytes=self.late_fetches, total_bytes=10)
        if self.late:
            self.late -= 1
            return agent_pb2.FetchResponse(done_bytes=self.late, total_bytes=10)
        if not request.whole and not request.ranges:
            return agent_pb2.FetchResponse(done=True, path="/place", files=self.files)
        self.brought.append(request.save)
        self.asked_for.append([one.path for one in request.ranges])
        return agent_pb2.FetchResponse(done=True, path="/there")


class Job:
    """One rank in each pod, or `per_pod`."""

    def __init__(self, folder: Path, pods: Sequence[Pod], per_pod: int = 1) -> None:
        self.pods = pods
        self._store = distributed.HashStore()
        self.folder = folder
        self._per_pod = per_pod
        self.own: Mapping[int, Sequence[Record]] = {}
        self.told_to_end = False
        self.ends_in: set[int] = set()
        """Ranks that are told to end once their agent was asked to fetch."""

    def choose(self, rank: int, *, partially: bool = False, own_files: bool = False, needed: Any = None) -> Any:
        """What the rank resumes from, or the error. `own_files`: those with its number in their names."""
        try:
            resumption = resuming.Resumption(self._session(rank), [""])
            if partially:
                return resumption.choose_partial([(".metadata", 0, 0)])
            if own_files or needed:
                own = needed or (lambda files: [one for one in files if str(rank) in one])
                return resumption.choose_files(own)
            return resumption.choose()
        except (Exception, SystemExit) as error:
            return error

    def choose_all(self, **options: Any) -> list[Any]:
        chosen: dict[int, Any] = {}

        def run(rank: int) -> None:
            chosen[rank] = self.choose(rank, **options)

        count = len(self.pods) * self._per_pod
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_SECONDS)
            assert not thread.is_alive(), "a rank hangs"
        return [chosen[rank] for rank in range(count)]

    def _pod(self, rank: int) -> Pod:
        return self.pods[rank // self._per_pod]

    def _whole(self, rank: int) -> list[Record]:
        """What was saved there, and what the agent has put in place."""
        brought = [record(step, save, committed=True) for save in self._pod(rank).brought for step in [int(save[1:])]]
        return [*self.own.get(rank // self._per_pod, ()), *brought]

    def _session(self, rank: int) -> Any:
        first = rank // self._per_pod * self._per_pod
        ranks = Ranks(
            rank=rank,
            world_size=len(self.pods) * self._per_pod,
            pod=tuple(range(first, first + self._per_pod)),
        )
        coordinator = StoreCoordinator(RankStore(self._store, ranks))
        numbers = iter(range(100))
        local = SimpleNamespace(
            whole=lambda by_framework: self._whole(rank),
            place=lambda record: self.folder / record.name,
            folder=self.folder.joinpath,
        )
        return _Session(
            is_told_to_end=lambda: self.told_to_end or (rank in self.ends_in and self._pod(rank).was_asked),
            settings=SimpleNamespace(lazy=True, volume=self.folder, socket=None),
            context=lambda: SimpleNamespace(coordinator=coordinator, leads_pod=ranks.leads_pod, local=local),
            next_number=lambda: next(numbers),
            holds_whole_job=len(self.pods) == 1,
            agent=Agent(self.folder / f"{rank // self._per_pod}.sock", ranks=ranks, holds_liveness_lock=True),
        )


class _Session(SimpleNamespace):
    @property
    def told_to_end(self) -> bool:
        return bool(self.is_told_to_end())


def record(step: int, save: str, *, committed: bool = False) -> Record:
    return Record(
        name=f"checkpoint-{step}",
        step=step,
        save=save,
        kind=Kind.PERIODIC,
        world_size=1,
        saved_at=float(step),
        files=(),
        committed=committed,
    )


@pytest.fixture
def job(short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    monkeypatch.setattr(restores, "_PAUSE_SECONDS", 0.01)
    with ExitStack() as stack:

        def make(*committed: Sequence[tuple[int, str]], per_pod: int = 1) -> Job:
            pods = [Pod(one) for one in committed]
            for number, pod in enumerate(pods):
                stack.enter_context(serving(short_directory / f"{number}.sock", pod))
            return Job(short_directory, pods, per_pod)

        yield make


def saves(chosen: Sequence[Any]) -> set[Any]:
    return {one.save if isinstance(one, Record) else one for one in chosen}


OLD, NEW = (1, "s1"), (2, "s2")


def test_all_ranks_of_all_pods_take_the_newest_that_is_committed(job: Callable[..., Job]) -> None:
    pods = job([NEW, OLD], [NEW, OLD], per_pod=2)
    assert saves(pods.choose_all()) == {"s2"}
    assert [pod.brought for pod in pods.pods] == [["s2"], ["s2"]]


def test_a_commit_that_one_pod_has_not_seen_yet_is_taken_by_none(job: Callable[..., Job]) -> None:
    assert saves(job([NEW, OLD], [OLD]).choose_all()) == {"s1"}


def test_nothing_committed_anywhere_is_a_fresh_start(job: Callable[..., Job]) -> None:
    assert saves(job([], []).choose_all()) == {None}


def test_a_store_that_does_not_answer_yet_is_waited_for(job: Callable[..., Job]) -> None:
    pods = job([OLD], [OLD])
    pods.pods[1].late = 3
    assert saves(pods.choose_all()) == {"s1"}


def test_what_one_pod_finds_damaged_no_pod_resumes_from(job: Callable[..., Job]) -> None:
    pods = job([NEW, OLD], [NEW, OLD], [NEW, OLD])
    pods.pods[1].damaged = {"s2"}
    assert saves(pods.choose_all()) == {"s1"}


def test_a_pod_that_finds_everything_damaged_holds_no_other(job: Callable[..., Job]) -> None:
    for finding in (0, 1):
        pods = job([OLD], [OLD])
        pods.pods[finding].damaged = {"s1"}
        chosen = pods.choose_all()
        assert isinstance(chosen[finding], RestoreError)
        assert chosen[finding].kind is ErrorKind.CHECKPOINT_DAMAGED
        assert isinstance(chosen[1 - finding], RanksError)
        assert f"rank {finding} left" in str(chosen[1 - finding])


def test_a_pod_with_all_ranks_takes_its_own_save_if_all_that_is_committed_is_damaged(job: Callable[..., Job]) -> None:
    pods = job([NEW], per_pod=2)
    pods.own = {0: [record(*OLD)]}
    pods.pods[0].damaged = {"s2"}
    assert saves(pods.choose_all()) == {"s1"}


def test_a_pod_without_room_stops_all_and_says_so(job: Callable[..., Job]) -> None:
    pods = job([NEW, OLD], [NEW, OLD])
    pods.pods[1].refuses = {"s2": grpc.StatusCode.RESOURCE_EXHAUSTED}
    other, own = pods.choose_all()
    assert isinstance(own, RestoreError)
    assert "no room" in str(own)
    assert isinstance(other, RestoreError)
    assert "another rank" in str(other)


def test_a_pod_with_all_ranks_takes_its_own_newer_save_and_asks_for_nothing(job: Callable[..., Job]) -> None:
    pods = job([OLD], per_pod=2)
    pods.own = {0: [record(*NEW)]}
    assert saves(pods.choose_all()) == {"s2"}
    assert pods.pods[0].brought == []


def test_a_pods_own_part_of_a_save_of_many_is_not_enough(job: Callable[..., Job]) -> None:
    pods = job([OLD], [OLD])
    pods.own = {0: [record(*NEW)], 1: [record(*NEW)]}
    assert saves(pods.choose_all()) == {"s1"}
    pods = job([OLD], [OLD])
    pods.own = {0: [record(*OLD)], 1: [record(*OLD)]}
    assert [one.step for one in pods.choose_all(partially=True)] == [1, 1]
    assert [pod.brought for pod in pods.pods] == [["s1"], []], "rank 0 alone reads where everything is"
    assert pods.pods[1].was_asked, "the other's agent is ready for what is asked next"


def test_each_pod_is_brought_the_files_that_its_ranks_need(job: Callable[..., Job]) -> None:
    pods = job([NEW, OLD], [NEW, OLD])
    for pod in pods.pods:
        pod.files = ["share-0", "share-1"]
    pods.pods[1].damaged = {"s2"}
    chosen = pods.choose_all(own_files=True)
    assert [pod.brought[-1] for pod in pods.pods] == ["s1", "s1"]
    assert [str(one.place) for one in chosen] == ["/place"] * 2
    assert [str(one.directory) for one in chosen] == ["/there"] * 2
    assert [pod.asked_for[-1] for pod in pods.pods] == [["share-0"], ["share-1"]]
    assert pods.pods[1].brought == ["s1", "s1"], "once before they agree, and once to read"


def test_a_reader_that_asks_without_waiting_hears_a_refusal_and_no_silence(job: Callable[..., Job]) -> None:
    pods = job([OLD])
    pods.pods[0].refuses = {"s1": grpc.StatusCode.RESOURCE_EXHAUSTED}
    session = pods._session(0)
    with pytest.raises(RestoreError, match="no room"):
        session.agent.restores().ask("s1", [("a", 0, 0)])
    pods.pods[0].refuses = {"s1": grpc.StatusCode.UNAVAILABLE}
    session.agent.restores().ask("s1", [("a", 0, 0)])


def test_files_that_no_rank_could_read_are_refused_by_all_before_they_are_brought(job: Callable[..., Job]) -> None:
    def needed(files: Sequence[str]) -> Sequence[str]:
        raise RestoreError(ErrorKind.NOT_RESTORED, "of other ranks", hint="")

    pods = job([OLD], [OLD])
    for pod in pods.pods:
        pod.files = ["share-0"]
    assert {str(error) for error in pods.choose_all(needed=needed)} == {"of other ranks"}
    assert [pod.brought for pod in pods.pods] == [[], []]


def test_files_that_are_too_many_to_list_are_all_brought(job: Callable[..., Job]) -> None:
    pods = job([OLD], [OLD])
    assert [str(one.directory) for one in pods.choose_all(own_files=True)] == ["/there"] * 2
    assert [pod.asked_for[-1] for pod in pods.pods] == [[], []]


def test_a_pod_that_still_downloads_what_another_found_damaged_stops(job: Callable[..., Job]) -> None:
    pods = job([NEW, OLD], [NEW, OLD])
    pods.pods[1].damaged = {"s2"}
    pods.pods[0].late_fetches = 10**6
    assert saves(pods.choose_all()) == {"s1"}


def test_a_pod_that_ends_while_it_restores_holds_no_other(job: Callable[..., Job]) -> None:
    pods = job([OLD], [OLD])
    pods.pods[1].late_fetches = 10**6
    pods.ends_in = {1}
    other, ending = pods.choose_all()
    assert isinstance(ending, SystemExit)
    assert isinstance(other, RestoreError)


def test_a_pod_that_ends_while_its_store_is_away_holds_no_other(job: Callable[..., Job]) -> None:
    for leaving in (0, 1):
        pods = job([OLD], [OLD])
        pods.pods[leaving].late = 10**6
        pods.ends_in = {leaving}
        pods.pods[leaving].was_asked = True
        chosen = pods.choose_all()
        assert isinstance(chosen[leaving], SystemExit)
        assert isinstance(chosen[1 - leaving], RanksError)


def test_an_agent_that_dies_is_waited_for_and_then_named(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restores, "AGENT_SECONDS", 0.05)
    pods = job([OLD])
    chosen = Job(pods.folder / "nobody", pods.pods).choose_all()[0]
    assert isinstance(chosen, RestoreError)
    assert chosen.kind is ErrorKind.NOT_RESTORED
    assert "has not answered" in str(chosen)


def test_bytes_that_never_arrive_end_the_resume_with_the_stores_words(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restores, "STORE_SECONDS", 0.0)
    pods = job([OLD])
    pods.pods[0].late = 10**6
    (chosen,) = pods.choose_all()
    assert isinstance(chosen, RestoreError)
    assert "the store is away" in str(chosen)


def test_a_pod_that_ends_while_it_waits_leaves(job: Callable[..., Job]) -> None:
    pods = job([OLD])
    pods.pods[0].late = 10**6
    pods.told_to_end = True
    (chosen,) = pods.choose_all()
    assert isinstance(chosen, SystemExit)
    assert chosen.code == names.JUST_IN_TIME_EXIT_CODE


def test_without_an_agent_nobody_starts_from_step_0() -> None:
    session = cast(Any, SimpleNamespace(agent=SimpleNamespace(restores=lambda: None)))
    with pytest.raises(RestoreError, match="there is no agent"):
        resuming._restores(session)
