"""A store in front of another, of which one answer has one byte changed on its way."""

from typing import Any

from keepstep_agent.ports import ObjectStore


class FlippingStore:
    """Changes the byte at `position` of the `at`-th answer to `get`, from 0; all else is the other store's."""

    def __init__(self, store: ObjectStore, *, at: int, position: int) -> None:
        self._store = store
        self._at = at
        self._position = position
        self.gets = 0
        self.fresh_gets = 0
        self.flipped = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def get(self, key: str, *, limit_bytes: int, fresh: bool = False) -> bytes:
        body = bytearray(await self._store.get(key, limit_bytes=limit_bytes, fresh=fresh))
        if self.gets == self._at and body:
            body[self._position % len(body)] ^= 1
            self.flipped = key
        self.gets += 1
        self.fresh_gets += fresh
        return bytes(body)
