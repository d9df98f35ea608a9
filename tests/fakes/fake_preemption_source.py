"""`ports.Notices` in memory: what stands, and what it cannot say."""

from collections.abc import Sequence

from mooring_agent.core.errors import ErrorKind, PreemptionSourceError
from mooring_agent.ports import TerminationNotice


class FakePreemptionSource:
    """`standing` is told at every look; `silent`: it does not answer."""

    cloud = "fake"

    def __init__(self, *, pause_seconds: float = 1.0) -> None:
        self.pause_seconds = pause_seconds
        self.standing: list[TerminationNotice] = []
        self.silent = False
        self.looks = 0
        self.closed = False

    async def answers(self) -> bool:
        return not self.silent

    async def look(self) -> Sequence[TerminationNotice]:
        self.looks += 1
        if self.silent:
            raise PreemptionSourceError(ErrorKind.UNREACHABLE, "it is silent", hint="wait")
        return list(self.standing)

    async def close(self) -> None:
        self.closed = True
