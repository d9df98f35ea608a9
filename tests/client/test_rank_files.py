"""Which checkpoints have a file for each rank, and what is said when another number of ranks resumes from them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep import Checkpointer
from keepstep.checkpoints.rank_files import file_of_a_rank
from keepstep.checkpoints.records import read_records, write_record
from keepstep_api import names

Make = Callable[..., Checkpointer]


@pytest.mark.parametrize(
    ("paths", "ranks", "found"),
    [
        (["rank_0.pt", "rank_1.pt"], 2, "rank_0.pt"),
        (["model.pt", "optim/rank0-of-2.pt", "optim/rank1-of-2.pt"], 2, "optim/rank0-of-2.pt"),
        (["step100/00/a.bin", "step100/01/a.bin", "step100/02/a.bin"], 3, "step100/00/a.bin"),
        (["rank_0.pt", "rank_1.pt", "rank_2.pt"], 2, None),
        (["rank_0.pt", "rank_1.pt"], 3, None),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], 2, None),
        ([".metadata", "__0_0.distcp", "__1_0.distcp"], 2, None),
        (["dcp/.metadata", "dcp/__0_0.distcp", "dcp/__1_0.distcp", "loader_0.pt", "loader_1.pt"], 2, "loader_0.pt"),
        (["state_0.pt"], 1, None),
        (["."], 2, None),
        ([], 2, None),
    ],
)
def test_a_file_of_a_rank_differs_in_the_number_of_its_rank_alone(
    paths: list[str], ranks: int, found: str | None
) -> None:
    assert file_of_a_rank(paths, ranks) == found


@pytest.mark.parametrize(("saved_by", "warnings"), [(2, 1), (1, 0)])
def test_another_number_of_ranks_is_told_so_before_it_loads(
    saved_by: int, warnings: int, make_checkpointer: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_checkpointer(volume=None, directory=tmp_path).save(5) as path:
        for rank in range(2):
            (path / f"rank_{rank}.pt").write_text("state")
    records = tmp_path / names.STATE_DIRECTORY / names.RECORDS_DIRECTORY
    (record,) = read_records(records)
    write_record(records, replace(record, world_size=saved_by))
    assert make_checkpointer(volume=None, directory=tmp_path).resume() is not None
    said = [one for one in caplog.messages if "checkpoint-5 was saved by 2 ranks" in one]
    assert len(said) == warnings
    assert all("rank_0.pt" in one and "start it with 2 ranks" in one for one in said)
