"""Whether each rank has written a file of its own into a checkpoint, which another number of ranks cannot load."""

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Final

_NUMBER: Final = re.compile(r"\d+")
_DCP_METADATA: Final = ".metadata"


def file_of_a_rank(paths: Iterable[str], world_size: int) -> str | None:
    """Return the first rank's file, if there are files that differ in the number of their rank alone, one for each.

    `paths`: relative, of all files. None for torch.distributed.checkpoint's, which any number of ranks loads.
    """
    groups: defaultdict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    names = set(paths)
    for path in sorted(names):
        if str(PurePosixPath(path).parent / _DCP_METADATA) in names:
            continue
        for found in _NUMBER.finditer(path):
            groups[path[: found.start()], path[found.end() :]][int(found[0])] = path
    of_each = (group for group in groups.values() if world_size > 1 and set(group) == set(range(world_size)))
    return min((group[0] for group in of_each), default=None)
