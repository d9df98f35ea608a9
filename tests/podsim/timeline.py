"""What happened in a pod and when, as kubelet's events would tell it: the tests' evidence."""

import time
from dataclasses import dataclass, field
from enum import StrEnum


class What(StrEnum):
    """A closed set of happenings."""

    STARTED = "started"
    READY = "ready"
    """The startup probe has succeeded, or there is none."""
    PROBE_FAILED = "probe failed"
    PRE_STOP = "preStop"
    SIGTERM = "SIGTERM"
    """The detail says after how many seconds SIGKILL follows."""
    SIGKILL = "SIGKILL"
    EXITED = "exited"
    DELETED = "deleted"
    EVICTED = "evicted"
    NODE_LOST = "node lost"
    RESTARTED = "restarted in place"
    ENDED = "ended"
    """No container of the pod runs, and none will."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """`at` in seconds of time.monotonic; `container` is empty where it concerns the pod."""

    at: float
    what: What
    container: str = ""
    detail: str = ""


@dataclass(slots=True)
class Timeline:
    """Written by kubelet's threads, read by tests."""

    moments: list[Moment] = field(default_factory=list)

    def note(self, what: What, container: str = "", detail: str = "") -> None:
        self.moments.append(Moment(at=time.monotonic(), what=what, container=container, detail=detail))

    def all(self, what: What, container: str = "") -> list[Moment]:
        return [one for one in list(self.moments) if one.what is what and one.container == container]

    def seconds_left(self, container: str) -> int:
        """What a container was given between SIGTERM and SIGKILL."""
        return int(self.all(What.SIGTERM, container)[0].detail.split()[0])

    def at(self, what: What, container: str = "") -> float:
        """When it happened first. AssertionError when it did not."""
        found = self.all(what, container)
        assert found, f"no {what} of {container or 'the pod'} in:\n{self}"
        return found[0].at

    def seconds_between(self, first: tuple[What, str] | What, second: tuple[What, str] | What) -> float:
        """From the first happening of one to the first of the other."""
        return self.at(*_pair(second)) - self.at(*_pair(first))

    def __str__(self) -> str:
        began = self.moments[0].at if self.moments else 0.0
        return "\n".join(
            f"{one.at - began:8.2f} s  {one.container or 'pod'}: {one.what} {one.detail}".rstrip()
            for one in self.moments
        )


def _pair(one: tuple[What, str] | What) -> tuple[What, str]:
    return (one, "") if isinstance(one, What) else one
