"""`ports.Cluster` in memory."""

from keepstep_agent.core.errors import ClusterError, ErrorKind
from keepstep_agent.ports import PodEvent


class FakeCluster:
    """`problem`: how every call ends; `forbidden`: what this service account may not, by resource."""

    def __init__(self) -> None:
        self.events: list[PodEvent] = []
        self.annotations: dict[str, str] = {}
        self.annotated: list[str] = []
        self.forbidden: set[str] = set()
        self.problem: ErrorKind | None = None
        self.calls = 0

    async def prepare(self) -> None:
        pass

    async def tell(self, event: PodEvent) -> None:
        self._check("events")
        self.events.append(event)

    async def annotate(self, key: str, value: str) -> None:
        self._check("pods")
        self.annotations[key] = value
        self.annotated.append(value)

    async def close(self) -> None:
        pass

    def _check(self, resource: str) -> None:
        self.calls += 1
        if resource in self.forbidden:
            raise ClusterError(ErrorKind.ACCESS_DENIED, f"{resource} are forbidden", hint="a Role")
        if self.problem is not None:
            raise ClusterError(self.problem, "it is away", hint="wait")
