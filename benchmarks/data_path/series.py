"""Cost against the number of files, and against the size: Keepstep beside one peer of each kind."""

from collections.abc import Callable, Sequence
from typing import Final

from benchmarks.data_path.comparison import Result, compare, measured, only
from benchmarks.data_path.keepstep import Keepstep
from benchmarks.data_path.tools import peers
from benchmarks.data_path.workplace import open_workplace

RIVALS: Final = "boto3 tuned,obstore tuned"
NUMBERS: Final = (1, 10, 100, 1000, 10_000)
NUMBERED_BYTES: Final = 512 << 20
SIZES_MIB: Final = (64, 256, 1024, 4096, 8192)


def by_number(rounds: int, say: Callable[[str], None], numbers: Sequence[int] = NUMBERS) -> dict[int, list[Result]]:
    """512 MiB in so many files."""
    return {count: _measure({f"f{n:05d}.bin": NUMBERED_BYTES // count for n in range(count)}, rounds, say)
            for count in numbers}  # fmt: skip


def by_size(rounds: int, say: Callable[[str], None], sizes_mib: Sequence[int] = SIZES_MIB) -> dict[int, list[Result]]:
    """So many MiB in four files."""
    return {mib: _measure({f"f{n}.bin": (mib << 20) // 4 for n in range(4)}, rounds, say) for mib in sizes_mib}


def _measure(sizes: dict[str, int], rounds: int, say: Callable[[str], None]) -> list[Result]:
    with open_workplace(sizes) as place:
        rivals = [tool for tool in only(peers(), RIVALS) if not tool.name.endswith("unchecked")]
        return measured(compare(place, [Keepstep(), *rivals], mode="upload-http", rounds=rounds, say=say))
