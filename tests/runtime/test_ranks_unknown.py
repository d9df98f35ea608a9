"""Ranks that cannot be looked at, as those of a foreign user: told once, and again when the trouble is another one."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs
from tests.core.play import settings

from keepstep_agent.core.agent.state import State
from keepstep_agent.core.errors import ErrorKind, VolumeError
from keepstep_agent.runtime.monitors.monitors import Monitors
from keepstep_agent.runtime.monitors.ranks import RanksLook


class _Presence:
    """`trouble`: why nobody can be looked at; empty: nobody is there."""

    trouble = ""

    def look(self) -> RanksLook:
        if self.trouble:
            raise VolumeError(ErrorKind.ACCESS_DENIED, self.trouble, hint="the same user")
        return RanksLook(alive=frozenset(), newest=None, age_seconds=0.0)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


async def test_a_trouble_that_lasts_is_told_once_and_again_when_it_changes(
    tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    live_ranks = _Presence()
    monitors = Monitors(
        engine=cast(Any, SimpleNamespace(state=State(settings=settings()))),
        clock=cast(Any, SimpleNamespace(now=lambda: 0.0)),
        live_ranks=cast(Any, live_ranks),
        executor=executor,
        settings=cast(Any, SimpleNamespace(volume=str(tmp_path))),
        mirror=None,
        unannounced=cast(Any, None),
    )
    with capture_logs() as lines:
        for trouble in ("rank 0 is foreign", "rank 0 is foreign", "rank 1 is foreign", "", "", "rank 1 is foreign"):
            live_ranks.trouble = trouble
            await monitors.look_at_ranks()
    told = [(line["event"], line.get("error")) for line in lines]
    assert told == [
        ("ranks.unknown", "rank 0 is foreign"),
        ("ranks.unknown", "rank 1 is foreign"),
        ("ranks.known_again", None),
        ("ranks.unknown", "rank 1 is foreign"),
    ]
