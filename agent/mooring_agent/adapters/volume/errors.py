"""How an OSError on the shared volume becomes a VolumeError: one table for every adapter that touches the volume."""

import errno

from mooring_agent.core.errors import ErrorKind, VolumeError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})


def volume_error(error: OSError, what: str) -> VolumeError:
    """The VolumeError for `error`; `what` says what was being done, with the path."""
    message = f"{what}: {error.strerror or error}"
    if error.errno in _FULL:
        return VolumeError(
            ErrorKind.DISK_FULL,
            message,
            hint="make room: raise the emptyDir's sizeLimit, or keep fewer checkpoints on disk",
        )
    if error.errno in _GONE:
        return VolumeError(
            ErrorKind.FILE_MISSING, message, hint="announce a checkpoint after its last file is written and closed"
        )
    return VolumeError(
        ErrorKind.VOLUME_UNUSABLE,
        message,
        hint="the volume must be mounted read-write, and the agent needs the trainer's UID or GID",
    )
