"""The bandwidth cap of a real agent: it holds while training goes on, and a termination notice lifts it."""

import time
from collections import deque
from pathlib import Path

import pytest
from tests.harness.agent_process import AgentProcess, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.servers.fault_proxy import FaultProxy
from tests.servers.server import Bucket

_CAP_BYTES_PER_SECOND = 1_000_000
_CAPPED_BYTES = 6_000_000
# With the first one, what is to come would take ten minutes.
_LOW_CAP_BYTES_PER_SECOND = 100_000
_LIFTED_BYTES = 60_000_000
# Pieces of half a MiB are not seen in ten seconds of it, and any machine has it to spare.
_WIRE_CAP_BYTES_PER_SECOND = 4_000_000
_WINDOW_SECONDS = 10.0


def capped_agent(folder: Path, bytes_per_second: int) -> AgentProcess:
    return AgentProcess(
        folder / "volume",
        f"file://{folder / 'destination'}",
        bandwidth_bytes_per_second=bytes_per_second,
        part_size_bytes="5MiB",
    )


def test_the_cap_holds(tmp_path: Path) -> None:
    with capped_agent(tmp_path, _CAP_BYTES_PER_SECOND) as agent:
        path = write_checkpoint(agent.checkpoints / "checkpoint-1", {"model.bin": _CAPPED_BYTES})
        begin = time.monotonic()
        capped = agent.announce(path, 1)
        agent.wait_committed(capped.save)
        # A bucket may begin full, so the first second's worth can be free.
        assert time.monotonic() - begin >= _CAPPED_BYTES / _CAP_BYTES_PER_SECOND - 1.5


def test_a_termination_notice_lifts_the_cap(tmp_path: Path) -> None:
    with capped_agent(tmp_path, _LOW_CAP_BYTES_PER_SECOND) as agent:
        save = agent.announce(
            write_checkpoint(agent.checkpoints / "checkpoint-1", {"model.bin": _LIFTED_BYTES}), 1
        ).save
        begun = tmp_path / "destination" / ".keepstep" / "uploads"
        wait_until(lambda: any(begun.glob("*/data")), HANG_SECONDS, "the upload is under way")
        agent.notify_termination(grace_seconds=3600)
        agent.wait_committed(save, HANG_SECONDS)


class Meter:
    """How many bytes the store's end of the wire received, and when."""

    def __init__(self, proxy: FaultProxy) -> None:
        self._proxy = proxy
        self._samples = deque([(time.monotonic(), proxy.received_bytes)])

    def rate(self, seconds: float) -> float:
        """Bytes per second over the last so many; 0 while it was not watched for so long."""
        now, total = time.monotonic(), self._proxy.received_bytes
        self._samples.append((now, total))
        while len(self._samples) > 1 and self._samples[1][0] <= now - seconds:
            self._samples.popleft()
        began_at, before = self._samples[0]
        return (total - before) / (now - began_at) if now - began_at >= seconds else 0.0


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{"model.bin": 600_000_000}, {f"{one}.bin": 100_000 for one in range(6_000)}], ids=len
)
def test_what_the_store_receives_of_many_requests_at_once_is_the_cap_within_five_percent(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path, sizes: dict[str, int]
) -> None:
    cap = _WIRE_CAP_BYTES_PER_SECOND
    agent = AgentProcess(
        tmp_path / "volume",
        rclone_bucket.destination,
        endpoint_url=fault_proxy.endpoint_url,
        bandwidth_bytes_per_second=cap,
        part_size_bytes="5MiB",
        max_concurrency=8,
    )
    with agent:
        warm_up = agent.announce(write_checkpoint(agent.checkpoints / "checkpoint-1", {"model.bin": 1}), 1)
        agent.wait_committed(warm_up.save)
        begin, before = time.monotonic(), fault_proxy.received_bytes
        agent.announce(write_checkpoint(agent.checkpoints / "checkpoint-2", sizes), 2)
        wait_until(lambda: fault_proxy.received_bytes > before, HANG_SECONDS, "the upload is under way")
        meter = Meter(fault_proxy)
        # A machine that is busy otherwise may take seconds from an agent; it catches up with none.
        wait_until(
            lambda: meter.rate(_WINDOW_SECONDS) >= 0.95 * cap, HANG_SECONDS, "ten seconds at the rate of the cap"
        )
        # Since the beginning: in a window that begins just after the proxy had to wait for a processor, it is more.
        received = fault_proxy.received_bytes - before
        assert received <= 1.05 * cap * (time.monotonic() - begin)

        agent.notify_termination(grace_seconds=600)
        meter = Meter(fault_proxy)
        wait_until(lambda: meter.rate(1.0) > 2 * cap, HANG_SECONDS, "a second above the cap, which is lifted")
