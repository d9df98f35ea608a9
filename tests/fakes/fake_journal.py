"""A journal in memory. What was appended survives `close`, as on disk: hand the same fake to the next agent."""

from collections.abc import Collection, Iterator, Sequence


class FakeJournal:
    """`ports.Journal` without a disk."""

    def __init__(self) -> None:
        self._records: list[bytes] = []
        self.aside: list[list[bytes]] = []

    def append(self, records: Sequence[bytes]) -> None:
        self._records.extend(records)

    def replay(self) -> Iterator[bytes]:
        return iter(list(self._records))

    def drop(self, positions: Collection[int]) -> None:
        dropped = set(positions)
        self._records = [record for position, record in enumerate(self._records) if position not in dropped]

    def move_aside(self) -> None:
        self.aside.append(self._records)
        self._records = []

    def close(self) -> None:
        """Nothing is held open."""
