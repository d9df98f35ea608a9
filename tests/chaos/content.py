"""Ground truth: what each rank writes into a checkpoint follows from run, attempt, step and rank alone.

So whoever knows these four can say of every stored byte whether it is right, without having been told the bytes.
"""

import random
from collections.abc import Mapping

_KIB = 1024
_MIB = 1024 * 1024
PART_BYTES = 5 * _MIB
"""The least that S3 takes, so that the large files are uploads of several parts."""
_MANY = 80
"""Small files enough that the agent stores them in an archive."""


def rank_files(run: str, attempt: str, step: int, rank: int) -> Mapping[str, bytes]:
    """Relative path to bytes: mostly some files, now and then one of several parts or many small ones."""
    generator = random.Random(f"{run}/{attempt}/{step}/{rank}")
    files = {f"rank-{rank}/step": f"{run} {attempt} {step} {rank}\n".encode()}
    shape = generator.random()
    if shape < 0.15:
        files[f"model-{rank}.bin"] = generator.randbytes(generator.randrange(PART_BYTES + 1, 3 * PART_BYTES))
    elif shape < 0.3:
        for number in range(_MANY):
            files[f"small-{rank}/{number}"] = generator.randbytes(generator.randrange(8 * _KIB))
    else:
        files[f"model-{rank}.bin"] = generator.randbytes(generator.randrange(_KIB, _MIB))
        files[f"model-{rank}/optimizer"] = generator.randbytes(generator.randrange(64 * _KIB))
    return files


def checkpoint_files(run: str, attempt: str, step: int, world_size: int) -> dict[str, bytes]:
    """What all ranks together write."""
    return {path: body for rank in range(world_size) for path, body in rank_files(run, attempt, step, rank).items()}
