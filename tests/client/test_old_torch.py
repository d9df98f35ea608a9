"""A torch that lacks what Keepstep needs of it: what is said."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from tests.harness.bounds import HANG_SECONDS
from torch.distributed import HashStore, PrefixStore, TCPStore

import keepstep
from keepstep.ranks.rank_store import Ranks, RankStore, open_rank_store

TORCH_LOOP = """
import torch
torch.__version__ = '2.8.0'
import keepstep
try:
    import keepstep.torch_loop
except keepstep.UsageError as error:
    print(error.kind, error.hint)
"""


def test_torch_loop_says_which_torch_it_needs(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", TORCH_LOOP], cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "unsupported install torch 2.9 or newer, or save with keepstep.Checkpointer\n"


class OldStore:
    """As those of torch 2.7 are: they cannot be cloned."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        if name in {"clone", "host"} and not isinstance(self._store, TCPStore):
            raise AttributeError(name)
        found = getattr(self._store, name)
        return OldStore(found) if name == "underlying_store" else found


def opened(monkeypatch: pytest.MonkeyPatch, store: Any) -> RankStore:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: OldStore(store))
    return open_rank_store(Ranks(world_size=2), "any")


def test_ranks_of_an_old_torch_meet_over_a_second_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def of_job(name: str) -> RankStore:
        connection = TCPStore("127.0.0.1", server.port, is_master=False)
        return opened(monkeypatch, PrefixStore("default_pg", PrefixStore(name, connection)))

    first, second, other = of_job("/attempt_1"), of_job("/attempt_1"), of_job("/attempt_2")
    first.publish("step", "7")
    assert second.read("step") == "7"
    assert other.read("step") is None


def test_ranks_say_which_torch_they_need_to_save_together(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(keepstep.UsageError) as refused:
        opened(monkeypatch, HashStore())
    assert "torch 2.8" in refused.value.hint
