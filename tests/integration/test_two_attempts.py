"""An old attempt still drains while a new one saves the same step to the same place: neither can hurt the other."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.harness.agent_process import AgentProcess, tree, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.servers.ceph import missing_programs
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Rule
from tests.servers.server import Bucket

MIB = 1024 * 1024
SIZES = {"model.safetensors": 13 * MIB, "config.json": 300}
STEP = 100
NAMES = ("old", "new")


class Attempt:
    """One start of the run: a volume of its own, and a line of its own to the store."""

    def __init__(self, name: str, directory: Path, bucket: Bucket, proxy: FaultProxy) -> None:
        self.proxy = proxy
        self.agent = AgentProcess(
            directory / name,
            bucket.destination,
            endpoint_url=proxy.endpoint_url,
            part_size_bytes="5MiB",
            watch="off",
        )
        self.seed = NAMES.index(name)
        self.save = ""
        self.original: dict[str, bytes] = {}

    def announce(self) -> None:
        source = write_checkpoint(self.agent.checkpoints / f"checkpoint-{STEP}", SIZES, seed=self.seed)
        self.original = tree(source)
        self.save = self.agent.announce(source, STEP).save

    def cut_off(self) -> None:
        """Its dead line is cut, and the next one works."""
        self.proxy.clear()
        self.proxy.outage(True)
        self.proxy.outage(False)

    def written(self) -> set[str]:
        """Keys that it has asked the store to write, whatever came of it."""
        return {request.path for request in self.proxy.log if request.method in ("PUT", "POST")}


@pytest.fixture(params=["without conditional writes", "with conditional writes"])
def bucket(request: pytest.FixtureRequest) -> Bucket:
    name = "rclone_bucket"
    if request.param == "with conditional writes":
        name = "moto_bucket" if missing_programs() else "ceph_bucket"
    found: Bucket = request.getfixturevalue(name)
    return found


@pytest.fixture
def attempts(bucket: Bucket, tmp_path: Path) -> Iterator[dict[str, Attempt]]:
    port = urlsplit(bucket.endpoint_url).port
    assert port is not None
    with ExitStack() as stack:
        made = {}
        for name in NAMES:
            proxy = FaultProxy(port)
            proxy.start()
            stack.callback(proxy.stop)
            made[name] = Attempt(name, tmp_path, bucket, proxy)
            stack.enter_context(made[name].agent)
        yield made


# Where the line of the one that shall commit last goes dead: in the middle of its bytes, or just before its marker.
DEAD_ENDS = {"its bytes": "partNumber=2", "its marker": "/.keepstep/commits/"}


@pytest.mark.parametrize(("last", "dead_end"), list(zip(NAMES, DEAD_ENDS, strict=True)))
def test_whoever_commits_last_no_key_is_shared_and_both_checkpoints_are_whole(
    attempts: dict[str, Attempt], bucket: Bucket, tmp_path: Path, last: str, dead_end: str
) -> None:
    (first,) = set(NAMES) - {last}
    held, free = attempts[last], attempts[first]
    held.proxy.add(
        Rule(name="dead", fault=Fault.BLACKHOLE, method="PUT", target=DEAD_ENDS[dead_end], times=-1, after_bytes=100)
    )
    # The old one was first to save; the new one reached the same step again.
    for name in NAMES:
        attempts[name].announce()
    free.agent.wait_committed(free.save)
    wait_until(lambda: held.proxy.hits("dead") > 0, HANG_SECONDS, "the other one is held up")
    view = BucketView(bucket)
    assert [marker.split(".")[-2] for marker in view.markers()] == [free.save]
    held.cut_off()
    held.agent.wait_committed(held.save)

    assert held.save != free.save
    assert held.written() & free.written() == set()
    assert len(view.markers()) == 2
    assert [row["problems"] for row in view.verify()] == [[], []]
    both = [attempt.original for attempt in attempts.values()]
    restored = tree(view.restore(tmp_path / "restored"))
    assert restored in both
    # The other one is just as good.
    chosen = both.index(restored)
    (marker,) = [marker for marker in view.markers() if attempts[NAMES[chosen]].save in marker]
    view.delete(marker)
    assert tree(view.restore(tmp_path / "restored-too")) == both[1 - chosen]


def test_after_a_restart_with_the_same_volume_the_late_commit_changes_nothing(
    attempts: dict[str, Attempt], bucket: Bucket
) -> None:
    first, last = NAMES
    held, free = attempts[last], attempts[first]
    held.proxy.add(Rule(name="dead", fault=Fault.BLACKHOLE, method="PUT", target="/.keepstep/commits/", times=-1))
    held.announce()
    wait_until(lambda: held.proxy.hits("dead") > 0, HANG_SECONDS, "its marker is on the way")
    held.agent.kill()
    free.announce()
    free.agent.wait_committed(free.save)
    held.proxy.clear()
    held.agent.start()
    held.agent.wait_committed(held.save)
    assert held.written() & free.written() == set()
    assert [row["problems"] for row in BucketView(bucket).verify()] == [[], []]


def test_conditional_writes_are_used_where_the_store_has_them_and_not_missed_where_it_has_not(
    attempts: dict[str, Attempt], request: pytest.FixtureRequest
) -> None:
    attempt = attempts["new"]
    attempt.announce()
    attempt.agent.wait_committed(attempt.save)
    markers = [
        one
        for one in attempt.proxy.log
        if one.method == "PUT" and f"/.keepstep/commits/{10**12 - 1 - STEP}." in one.path
    ]
    has_conditions = request.node.callspec.params["bucket"] == "with conditional writes"
    assert attempt.agent.log("store.probed")[0]["conditional_put"] is has_conditions
    assert {"if-none-match" in marker.headers for marker in markers} == {has_conditions}
