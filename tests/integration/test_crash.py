"""The agent dies by SIGKILL again and again, and nothing is lost, left over or sent twice."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from tests.harness.agent_process import AgentProcess, tree, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Request, Rule
from tests.servers.rclone import RcloneServer
from tests.servers.server import Bucket
from tests.servers.tls import Certificate

from keepstep_agent.adapters.volume.own_entries import AGENT_NOTE

MIB = 1024 * 1024
KILLS = 25
PART_BYTES = 8 * MIB
SIZES = {
    "model-00001.safetensors": 31 * MIB,
    "model-00002.safetensors": 21 * MIB,
    "model-00003.safetensors": 17 * MIB,
    "model-00004.safetensors": 9 * MIB,
    "optimizer-0.pt": 20 * MIB + 1,
    "optimizer-1.pt": 15 * MIB,
    "exactly-one-part.bin": PART_BYTES,
    "nested/scheduler.pt": 7 * MIB - 4096 - 1,
    "config.json": 4096,
    "empty": 0,
}
# So slow that what is sent while a busy machine comes late to a kill, each time, leaves enough for all of them.
BYTES_PER_SECOND = 8 * MIB
LONGEST_BLIND_LIFE_BYTES = 8 * MIB
LONGEST_WAIT_BYTES = 24 * MIB


def is_create(request: Request) -> bool:
    return request.method == "POST" and request.query.startswith("uploads")


def is_complete(request: Request) -> bool:
    return request.method == "POST" and "uploadId=" in request.query


def is_list_parts(request: Request) -> bool:
    return request.method == "GET" and "uploadId=" in request.query


def is_manifest(request: Request) -> bool:
    return request.method == "PUT" and "/.keepstep/manifest-" in request.path


def is_marker(request: Request) -> bool:
    return request.method == "PUT" and "/.keepstep/commits/" in request.path


MOMENTS = (is_create, is_complete, is_list_parts, is_manifest, is_marker)


class Lives:
    """Chooses, from a seed, the moment at which each life of the agent ends."""

    def __init__(self, agent: AgentProcess, proxy: FaultProxy, seed: int, *, counts_deaths: bool) -> None:
        self._counts_deaths = counts_deaths
        self._agent = agent
        self._proxy = proxy
        self._random = random.Random(seed)

    def end_one(self) -> str:
        """Wait for a moment by chance and kill; says which it was in the end."""
        choice = self._random.random()
        if choice < 0.1:
            started = len(self._agent.log("journal.replayed"))
            self._kill_when(lambda: len(self._agent.log("journal.replayed")) >= started)
            return "while it starts"
        moment = self._random.choice(MOMENTS) if choice < 0.5 else None
        # Bytes rather than seconds, so that a slow machine sees the same deaths.
        life_bytes = LONGEST_WAIT_BYTES if moment else self._random.randrange(LONGEST_BLIND_LIFE_BYTES)
        limit_bytes = self._sent_bytes() + life_bytes
        seen = self._count(moment)
        self._kill_when(lambda: self._count(moment) > seen or self._sent_bytes() > limit_bytes)
        return moment.__name__ if moment and self._count(moment) > seen else "between bytes"

    def end_at(self, moment: Callable[[Request], bool]) -> str:
        """Kill as soon as such a request is seen."""
        seen = self._count(moment)
        self._kill_when(lambda: self._count(moment) > seen)
        return moment.__name__

    def _kill_when(self, holds: Callable[[], bool]) -> None:
        wait_until(lambda: holds() or self._agent.process.poll() is not None, HANG_SECONDS, "the moment to die")
        assert self._agent.process.poll() is None, self._agent.log_text()[-2000:]
        self._agent.kill()
        if not self._counts_deaths:
            (self._agent.volume / ".keepstep" / "agent" / AGENT_NOTE).unlink(missing_ok=True)
        # What the kernel still held has arrived or is gone: from here on the store does not change.
        wait_until(lambda: not self._proxy.open_connections, HANG_SECONDS, "the dead agent's requests are over")

    def _sent_bytes(self) -> int:
        return sum(request.body_bytes for request in self._proxy.log)

    def _count(self, moment: Callable[[Request], bool] | None) -> int:
        return sum(map(moment, self._proxy.log)) if moment else 0


def is_probe(request: Request) -> bool:
    return "/.keepstep/probe/" in request.path


def sent_twice(log: list[Request]) -> list[tuple[str, ...]]:
    """Parts, files sent whole, and markers that the store accepted more than once; manifests may come again."""
    accepted = Counter(
        (request.path, *parse_qs(request.query).get("uploadId", []), *parse_qs(request.query).get("partNumber", []))
        for request in log
        if request.method == "PUT" and request.status == 200 and not is_manifest(request) and not is_probe(request)
    )
    return [what for what, count in accepted.items() if count > 1]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kills_lose_nothing_leave_nothing_and_send_no_finished_part_twice(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    deaths = live_and_die(rclone_bucket, fault_proxy, tmp_path, steps=(100, 200, 300, 400), kills=KILLS)

    assert len(deaths) == len(MOMENTS) + 2, f"some kind of moment never came: {deaths}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", ["kernel", "tls", "plain"])
def test_kills_lose_nothing_however_bytes_are_sent(
    way: str, rclone_server: RcloneServer, rclone_bucket: Bucket, certificate: Certificate, tmp_path: Path
) -> None:
    proxy = FaultProxy(rclone_server.port, certificate=certificate if way == "tls" else None)
    proxy.start()
    try:
        if way == "kernel":
            proxy.add(Rule(name="check", fault=Fault.CHECK_CRC64NVME, method="PUT", times=-1))
        settings: dict[str, object] = {"ca_bundle": certificate.certificate} if way == "tls" else {}
        if way == "plain":
            settings["module"] = "tests.harness.plain_transfer"
        live_and_die(rclone_bucket, proxy, tmp_path, steps=(100,), kills=8, counts_deaths=False, **settings)
    finally:
        proxy.stop()


def live_and_die(
    bucket: Bucket,
    proxy: FaultProxy,
    directory: Path,
    *,
    steps: tuple[int, ...],
    kills: int,
    counts_deaths: bool = True,
    **settings: Any,
) -> Counter[str]:
    """Save, and kill the agent so often; returns how it died once all is seen to be there.

    Without `counts_deaths` no agent knows that the one before it died. Else, where several lives in a row store
    nothing, the only save is tried after longer and longer pauses, which take minutes.
    """
    view = BucketView(bucket)
    proxy.throttle(BYTES_PER_SECOND)
    agent = AgentProcess(
        directory / "volume",
        bucket.destination,
        endpoint_url=proxy.endpoint_url,
        part_size_bytes=PART_BYTES,
        max_concurrency=2,
        **settings,
    )
    originals = {}
    deaths: Counter[str] = Counter()
    with agent:
        for step in steps:
            source = write_checkpoint(agent.checkpoints / f"checkpoint-{step}", SIZES, seed=step)
            originals[step] = tree(source)
            agent.announce(source, step)
        lives = Lives(agent, proxy, seed=4, counts_deaths=counts_deaths)
        # Chance may miss the beginning of a file: few are left to begin once many lives have passed.
        deaths[lives.end_at(is_create)] += 1
        agent.start(wait=False)
        for _ in range(kills):
            deaths[lives.end_one()] += 1
            assert len(view.markers()) < len(steps), f"everything was committed after {deaths.total()} kills only"
            agent.start(wait=False)
        # And it seldom meets the last steps of a commit.
        for moment in (is_complete, is_manifest, is_marker):
            deaths[lives.end_at(moment)] += 1
            agent.start(wait=False)
        proxy.throttle(0)
        staged = agent.volume / ".keepstep" / "staged"
        wait_until(
            lambda: len(view.markers()) == len(steps) and not any(staged.iterdir()),
            HANG_SECONDS,
            "all is committed and released",
        )

    assert sent_twice(proxy.log) == []
    # An upload of a probe that was killed has no owner; prune aborts it when it is a day old.
    assert [key for key in view.uploads() if "/.keepstep/probe/" not in key] == []
    assert [row["problems"] for row in view.verify()] == [[] for _ in steps]
    # Newest first: once its marker is gone, the next older one is what restore finds.
    for step, marker in zip(sorted(steps, reverse=True), reversed(view.markers()), strict=True):
        restored = view.restore(directory / f"other-{step}")
        assert restored.name == f"checkpoint-{step}"
        assert tree(restored) == originals[step]
        view.delete(marker)
    return deaths


@pytest.mark.parametrize("part_size_bytes", [5 * MIB, 16 * MIB])
def test_an_upload_that_a_kill_cut_short_goes_on_in_its_parts_after_a_change_of_the_setting(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path, part_size_bytes: int
) -> None:
    view = BucketView(rclone_bucket)

    def agent(part_size_bytes: int) -> AgentProcess:
        return AgentProcess(
            tmp_path / "volume",
            rclone_bucket.destination,
            endpoint_url=fault_proxy.endpoint_url,
            part_size_bytes=part_size_bytes,
            max_concurrency=2,
        )

    fault_proxy.throttle(BYTES_PER_SECOND)
    with agent(PART_BYTES) as before:
        source = write_checkpoint(before.checkpoints / "checkpoint-100", {"model.bin": 40 * MIB}, seed=1)
        original = tree(source)
        before.announce(source, 100)
        wait_until(
            lambda: before.status().checkpoints[0].durable_bytes >= 2 * PART_BYTES,
            HANG_SECONDS,
            "some parts are stored",
        )
        before.kill()
    fault_proxy.throttle(0)
    wait_until(lambda: not fault_proxy.open_connections, HANG_SECONDS, "the dead agent's requests are over")
    with agent(part_size_bytes):
        wait_until(lambda: len(view.markers()) == 1, HANG_SECONDS, "it is committed")

    assert sent_twice(fault_proxy.log) == []
    assert view.uploads() == []
    assert [row["problems"] for row in view.verify()] == [[]]
    assert tree(view.restore(tmp_path / "other")) == original
