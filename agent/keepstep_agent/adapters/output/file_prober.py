"""Examines files of the output directories: what their formats show, whether somebody writes to them, how they grew."""

import fcntl
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from keepstep_agent.adapters.output.file_formats import prove
from keepstep_agent.adapters.output.output_directories import OutputDirectories
from keepstep_agent.adapters.volume.shared_volume import Folder
from keepstep_agent.core.mirror.file_states import Evidence, Proof

_NOT_COMPLETE: Final = "its format shows that it is not complete"
_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 4096
_MOST_FILES: Final = 10_000
_LAST_FILE_OF_DCP: Final = ".metadata"
"""torch.distributed.checkpoint writes it when all `.distcp` files are complete."""
_DCP_SUFFIX: Final = ".distcp"


@dataclass(frozen=True, slots=True)
class _Sample:
    """Bytes of a file, from all over its length at the time."""

    inode: int
    size_bytes: int
    digest: bytes


class FileProber:
    """Examines the files of one volume. `examine` blocks; call it from one thread at a time."""

    def __init__(self, output: OutputDirectories) -> None:
        self._output = output
        self._samples: dict[str, _Sample] = {}

    def examine(self, paths: Mapping[str, bool]) -> dict[str, Evidence]:
        """Return what is found out about each file. The value of a path: it has become longer, so compare its bytes."""
        found: dict[str, Evidence] = {}
        different: dict[Evidence, Evidence] = {}
        for path, grew in paths.items():
            above, _, name = path.rpartition("/")
            try:
                with self._output.folder(above) as folder, os.fdopen(folder.open_file(name), "rb") as file:
                    status = os.fstat(file.fileno())
                    proof = prove(file, name, status.st_size)
                    if proof is Proof.NONE and name.endswith(_DCP_SUFFIX) and _is_followed(folder, status.st_mtime_ns):
                        proof = Proof.WHOLE
                    evidence = Evidence(
                        proof=proof,
                        reason=_NOT_COMPLETE if proof is Proof.BROKEN else "",
                        is_open=is_open_for_writing(file.fileno()),
                        only_grew=self._only_grew(path, file.fileno(), status) if grew else None,
                    )
                    # There are few different ones, of perhaps 100,000 files.
                    found[path] = different.setdefault(evidence, evidence)
            except FileNotFoundError:
                continue
            except OSError as error:
                found[path] = Evidence(proof=Proof.BROKEN, reason=f"it cannot be read: {error.strerror}")
        return found

    def _only_grew(self, path: str, descriptor: int, status: os.stat_result) -> bool | None:
        """Whether the bytes are unchanged that the file had when this was asked last; None if it was not."""
        before = self._samples.pop(path, None)
        if len(self._samples) < _MOST_FILES:
            digest = _digest(descriptor, status.st_size)
            self._samples[path] = _Sample(status.st_ino, status.st_size, digest)
        if before is None or before.inode != status.st_ino:
            return None
        return before.size_bytes <= status.st_size and _digest(descriptor, before.size_bytes) == before.digest


def is_open_for_writing(descriptor: int) -> bool | None:
    """Whether a process has a file open for writing, of whatever container; None where the kernel does not tell.

    The kernel grants a lease of reading only if nobody has. Whoever opens the file meanwhile waits until it is given
    back, which it is at once.
    """
    try:
        # Of a lease that is broken the kernel tells by a signal, and this one is ignored unless somebody handles it.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        return True
    except OSError:
        return None
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def _is_followed(folder: Folder, mtime_ns: int) -> bool:
    try:
        return folder.status(_LAST_FILE_OF_DCP).st_mtime_ns >= mtime_ns
    except OSError:
        return False


def _digest(descriptor: int, size_bytes: int) -> bytes:
    """Digest some bytes of the first `size_bytes`: all of a small file, else pieces from its beginning to its end."""
    digest = blake2b(digest_size=16)
    step_bytes = max(_SAMPLE_BYTES, (size_bytes - _SAMPLE_BYTES) // (_SAMPLES - 1))
    for number in range(_SAMPLES):
        begin = number * step_bytes if number < _SAMPLES - 1 else max(0, size_bytes - _SAMPLE_BYTES)
        if begin < size_bytes:
            digest.update(os.pread(descriptor, min(_SAMPLE_BYTES, size_bytes - begin), begin))
    return digest.digest()
