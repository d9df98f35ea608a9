"""`ports.PreemptionSource` in memory."""

from collections.abc import Sequence

from keepstep_agent.core.errors import ErrorKind, PreemptionSourceError
from keepstep_agent.ports import TerminationNotice


class FakePreemptionSource:
    """Every look returns the notices in `standing`; with `silent` it raises an error."""

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
