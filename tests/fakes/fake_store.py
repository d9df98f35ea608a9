"""The store in memory, which notes every call and fails on request.

`fail` queues errors: the next call of that name raises instead of acting, or after acting, like a lost answer.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from tests.fakes.memory_store import MemoryStore

from keepstep_agent.core.errors import ErrorKind, StoreError


@dataclass(frozen=True, slots=True)
class _Failure:
    error: StoreError
    after_acting: bool


class FakeStore(MemoryStore):
    """`calls` has (method, key), of calls that failed too."""

    def __init__(self, *, conditional_put: bool = True, now: float = 1_700_000_000.0) -> None:
        super().__init__(conditional_put=conditional_put, now=now)
        self.calls: list[tuple[str, str]] = []
        self._failures: dict[str, list[_Failure]] = {}

    def fail(self, method: str, kind: ErrorKind, *, times: int = 1, after_acting: bool = False) -> None:
        error = StoreError(kind, f"{method} fails because a test wants it to")
        self._failures.setdefault(method, []).extend([_Failure(error, after_acting)] * times)

    def called(self, method: str, key: str) -> StoreError | None:
        """Raises a queued failure, or returns the one to raise after acting."""
        self.calls.append((method, key))
        queue = self._failures.get(method)
        if not queue:
            return None
        failure = queue.pop(0)
        if failure.after_acting:
            return failure.error
        raise failure.error


def _noted(method: str) -> Any:
    act = getattr(MemoryStore, method)

    async def call(store: FakeStore, *arguments: Any, **options: Any) -> Any:
        lost = store.called(method, arguments[0] if arguments else "")
        answer = await act(store, *arguments, **options)
        if lost:
            raise lost
        return answer

    async def listing(store: FakeStore, prefix: str) -> AsyncIterator[Any]:
        store.called(method, prefix)
        async for one in act(store, prefix):
            yield one

    return listing if method in ("list", "list_folders", "list_uploads") else call


for _method in (name for name in vars(MemoryStore) if not name.startswith("_") and name != "close"):
    setattr(FakeStore, _method, _noted(_method))
