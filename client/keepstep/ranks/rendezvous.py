"""Rendezvous: the ranks of one start of the job find each other in a store that may hold keys of earlier starts.

torchelastic keeps its store across restarts, and no environment variable identifies the start in the same way on all
nodes. So each rank publishes a random token; rank 0 answers each rank with its token and one nonce for all; each rank
confirms the nonce. When all have confirmed, the rendezvous is complete, and keys below the nonce belong to this start
alone. Rank 0 also says which ranks share a volume, because launchers differ in what they tell a process about that, and
what each of them has said about itself.
"""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from keepstep.errors import StoreLostError
from keepstep.ranks.rank_store import Ranks, RankStore, named_ranks

MEET_SECONDS: Final = 600.0
"""Long, because one rank may prepare its data before it comes."""


def rendezvous(
    store: RankStore, volume: str, lock: str = "", *, seconds: float = MEET_SECONDS
) -> tuple[str, Ranks, Mapping[int, str]]:
    """Wait for all ranks; return the nonce of this start of the job, the same on all of them, and this one's place.

    `volume` is the same for ranks that share one. `lock` names the liveness lock that this rank holds there; the third
    value has those of the others that share it. Raises StoreLostError, also when some ranks do not come.
    """
    token = secrets.token_hex(8)
    store.publish(f"token/{store.ranks.rank}", json.dumps([token, volume, lock]))
    host = _Host(store) if store.ranks.rank == 0 else None
    began_at = time.monotonic()
    give_up_at = began_at + seconds
    most_seconds: float | None = None
    nonce = ""
    while time.monotonic() < give_up_at:
        if most_seconds is None and (most_seconds := store.watch.most_seconds()) is not None:
            give_up_at = min(give_up_at, time.monotonic() + most_seconds)
        if host is not None:
            host.look()
        answer = json.loads(store.read(f"answer/{store.ranks.rank}") or "{}")
        if answer.get("token") == token:
            if answer["nonce"] != nonce:
                nonce = answer["nonce"]
                store.publish(f"confirmed/{store.ranks.rank}", nonce)
            if store.read("met") == nonce:
                locks = dict(zip(answer["pod"], answer["locks"], strict=True))
                others = {rank: name for rank, name in locks.items() if name and rank != store.ranks.rank}
                return nonce, replace(store.ranks, pod=tuple(answer["pod"])), others
        time.sleep(store.look_seconds)
    # A rank with a token of an earlier start may be missing too, and cannot be told from one that has come.
    absent = store.ranks_without("token")
    named = f", there is no sign of {named_ranks(absent)}" if absent else ""
    waited_seconds = min(seconds, time.monotonic() - began_at)
    raise StoreLostError(f"not all {store.ranks.world_size} ranks came within {waited_seconds:.0f} s{named}")


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

    def _answers(self, tokens: Sequence[tuple[str, str, str]]) -> Sequence[dict[str, Any]]:
        pods: dict[str, dict[int, str]] = {}
        for rank, (_, volume, lock) in enumerate(tokens):
            pods.setdefault(volume, {})[rank] = lock
        return [
            {"token": token, "nonce": self._nonce, "pod": list(pods[volume]), "locks": list(pods[volume].values())}
            for token, volume, _ in tokens
        ]
