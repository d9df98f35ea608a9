"""Rendezvous: the ranks of one start of the job find each other in a store that may hold keys of earlier starts.

torchelastic keeps its store across restarts, and no environment variable identifies the start in the same way on all
nodes. So each rank publishes a random token; rank 0 answers each rank with its token and one nonce for all; each rank
confirms the nonce. When all have confirmed, the rendezvous is complete, and keys below the nonce belong to this start
alone. Rank 0 also says which ranks share a volume, because launchers differ in what they tell a process about that.
"""

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from keepstep.errors import StoreLostError
from keepstep.ranks.rank_store import Ranks, RankStore, named_ranks

MEET_SECONDS: Final = 600.0
"""Long, because one rank may prepare its data before it comes."""


def rendezvous(store: RankStore, volume: str, *, seconds: float = MEET_SECONDS) -> tuple[str, Ranks]:
    """Wait for all ranks; return the nonce of this start of the job, the same on all of them, and this one's place.

    `volume` is the same for ranks that share one. Raises StoreLostError, also when some ranks do not come.
    """
    token = secrets.token_hex(8)
    store.publish(f"token/{store.ranks.rank}", json.dumps([token, volume]))
    host = _Host(store) if store.ranks.rank == 0 else None
    give_up_at = time.monotonic() + seconds
    nonce = ""
    while time.monotonic() < give_up_at:
        if host is not None:
            host.look()
        answer = json.loads(store.read(f"answer/{store.ranks.rank}") or "{}")
        if answer.get("token") == token:
            if answer["nonce"] != nonce:
                nonce = answer["nonce"]
                store.publish(f"confirmed/{store.ranks.rank}", nonce)
            if store.read("met") == nonce:
                return nonce, replace(store.ranks, pod=tuple(answer["pod"]))
        time.sleep(store.look_seconds)
    # A rank with a token of an earlier start may be missing too, and cannot be told from one that has come.
    absent = store.ranks_without("token")
    named = f", there is no sign of {named_ranks(absent)}" if absent else ""
    raise StoreLostError(f"not all {store.ranks.world_size} ranks came within {seconds:.0f} s{named}")


class _Host:
    """Rank 0's part: answers the tokens, and answers all again when one is replaced: it was of an earlier start."""

    def __init__(self, store: RankStore) -> None:
        self._store = store
        self._answered: Sequence[str] = ()
        self._nonce = ""

    def look(self) -> None:
        tokens = self._store.gather("token", 0.0)
        if tokens is None:
            return
        if tokens != self._answered:
            self._answered = tokens
            self._nonce = secrets.token_hex(4)
            for rank, answer in enumerate(self._answers([json.loads(token) for token in tokens])):
                self._store.publish(f"answer/{rank}", json.dumps(answer))
        confirmed = self._store.gather("confirmed", 0.0)
        if confirmed is not None and set(confirmed) == {self._nonce}:
            self._store.publish("met", self._nonce)

    def _answers(self, tokens: Sequence[tuple[str, str]]) -> Sequence[dict[str, Any]]:
        pods: dict[str, list[int]] = {}
        for rank, (_, volume) in enumerate(tokens):
            pods.setdefault(volume, []).append(rank)
        return [{"token": token, "nonce": self._nonce, "pod": pods[volume]} for token, volume in tokens]
