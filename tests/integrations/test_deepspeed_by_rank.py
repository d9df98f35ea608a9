"""DeepSpeed's ranks in several pods read, of a checkpoint that is restored lazily, the files that are their own."""

from pathlib import Path

import pytest
from tests.servers.fault_proxy import FaultProxy
from tests.servers.server import Bucket
from tests.torch_loop.pods import Pods

from keepstep.integrations.deepspeed import files_of

pytest.importorskip("deepspeed")
PROGRAM = Path(__file__).with_name("deepspeed_program.py")
WIDTH = 2_000_000
"""Of one matrix: 24 MB of weights and moments."""

SHARES = [
    f"{kind}_pp_rank_{rank}_mp_rank_00_{what}"
    for rank in range(2)
    for kind, what in (("bf16_zero", "optim_states.pt"), ("zero", "model_states.pt"))
]
COMMON = ["latest_universal", "mp_rank_00_model_states.pt", "layer_0_expert_1_mp_rank_00_model_states.pt"]


def test_a_rank_reads_its_own_shares_and_what_is_nobodys() -> None:
    files = [*COMMON, *SHARES]
    assert files_of(files, [0, 1], world_size=2) == files
    assert files_of(files, [1], world_size=2) == [*COMMON, *SHARES[2:]]


@pytest.mark.parametrize(
    "files",
    [
        COMMON,
        SHARES,
        [name.replace("_pp_rank_1_mp_rank_00", "_pp_rank_0_mp_rank_01") for name in SHARES],
        [*SHARES, SHARES[0].replace("mp_rank_00", "mp_rank_01")],
    ],
    ids=["no shares", "of fewer ranks", "parallel models", "both"],
)
def test_where_numbers_are_not_those_of_ranks_all_files_are_read(files: list[str]) -> None:
    assert files_of(files, [1], world_size=3 if files is SHARES else 2) == ()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_pods_read_their_own_shares_and_go_on_bit_identical(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, short_directory: Path
) -> None:
    def job(folder: str, destination: str) -> Pods:
        (short_directory / folder).mkdir()
        return Pods(short_directory / folder, 2, destination, fault_proxy, program=PROGRAM)

    with job("first", rclone_bucket.destination) as first:
        first.train("--width", WIDTH, "--steps", 2)
        whole_bytes = first.stored_bytes()
    with job("second", rclone_bucket.destination) as second:
        fault_proxy.log.clear()
        second.train("--width", WIDTH, "--steps", 4, "--load", "own")
        read_bytes = [second.read_bytes(pod) for pod in second.pods]
        resumed = [pod.says("loss=") for pod in second.pods]
        begun = [pod.says("begin") for pod in second.pods]
        loaded = [pod.says("loaded=") for pod in second.pods]
    with job("third", f"{rclone_bucket.destination}-uninterrupted") as third:
        third.train("--width", WIDTH, "--steps", 4)
        assert [pod.says("loss=") for pod in third.pods] == resumed
    assert begun == [["step=2 mine=2"]] * 2
    assert loaded == [["at-2"]] * 2, "programs read the step from the path"
    assert max(read_bytes) < 0.7 * whole_bytes
    assert sum(read_bytes) <= 1.1 * whole_bytes
