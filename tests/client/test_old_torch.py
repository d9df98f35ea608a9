"""A torch that lacks what Mooring needs of it: what is said."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

import mooring
from mooring.ranks.rank_store import Ranks, open_rank_store

# As torch 2.8 is.
TORCH_LOOP = """
from torch.distributed.checkpoint import staging
del staging.DefaultStager, staging.StagingOptions
import mooring
try:
    import mooring.torch_loop
except mooring.UsageError as error:
    print(error.kind, error.hint)
"""


def test_torch_loop_says_which_torch_it_needs(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", TORCH_LOOP], cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "unsupported install torch 2.9 or newer, or save with mooring.Checkpointer\n"


def test_ranks_say_which_torch_they_need_to_save_together(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        """As those of torch 2.7 are: they cannot be cloned."""

    def found() -> Any:
        return Store()

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", found)
    with pytest.raises(mooring.UsageError) as refused:
        open_rank_store(Ranks(world_size=2), "any")
    assert "torch 2.8" in refused.value.hint
