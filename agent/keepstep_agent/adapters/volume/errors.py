"""Turns an OSError on the shared volume into a VolumeError: one table for all code that touches the volume."""

import errno

from keepstep_agent.core.errors import ErrorKind, VolumeError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR})
_NO_FOLDER = _GONE | {errno.EEXIST}
# Raised by `shared_volume` for a name that leads elsewhere.
_FOREIGN = frozenset({errno.ELOOP, errno.EXDEV, errno.EINVAL})


def volume_error(error: OSError, what: str) -> VolumeError:
    """Return the VolumeError for `error`; `what` says what was being done, with the path."""
    if error.errno in _GONE:
        return VolumeError(
            ErrorKind.FILE_MISSING,
            f"{what}: {error.strerror or error}",
            hint="announce a checkpoint after its last file is written and closed",
        )
    return folder_error(error, what)


def folder_error(error: OSError, what: str) -> VolumeError:
    """As `volume_error`, for a folder that Keepstep makes: if it is missing, the volume is wrong, not a checkpoint."""
    message = f"{what}: {error.strerror or error}"
    if error.errno in _FULL:
        return VolumeError(
            ErrorKind.DISK_FULL,
            message,
            hint="make room: raise the emptyDir's sizeLimit, or keep fewer checkpoints on disk",
        )
    if error.errno == errno.EOVERFLOW:
        return VolumeError(
            ErrorKind.BAD_REQUEST, message, hint="write fewer and larger files, or give them shorter names"
        )
    if error.errno in _NO_FOLDER:
        return VolumeError(
            ErrorKind.VOLUME_UNUSABLE, message, hint="set --volume to a directory, or where one can be created"
        )
    if error.errno in _FOREIGN:
        return VolumeError(
            ErrorKind.VOLUME_UNUSABLE,
            message,
            hint="remove it: Keepstep keeps its own folder or file there, not a link, a mount or a special file",
        )
    return VolumeError(
        ErrorKind.VOLUME_UNUSABLE,
        message,
        hint="mount the volume read-write, and give the agent the trainer's UID or GID",
    )
