"""The pair of files that the webhook serves with, put in place at once.

Owns the folder. Both names lead through one link, whose change swaps both, as kubelet does it with a Secret's volume:
nobody sees the certificate of one pair with the key of another. Whatever a crash left behind goes with the next pair.
"""

import contextlib
import os
import secrets
import shutil
from datetime import datetime
from pathlib import Path
from typing import Final

from cryptography import x509

from mooring_agent.core.errors import ErrorKind, MooringError
from mooring_agent.webhook.authority import Pair
from mooring_agent.webhook.serving_certificate import CERTIFICATE_FILE, KEY_FILE

_LINK: Final = "..data"
_PAIR_PREFIX: Final = "..pair-"


def put_pair(folder: Path, pair: Pair) -> bool:
    """Make it what is served; whether it is new. Raises MooringError where the folder cannot be written."""
    try:
        if _read(folder / CERTIFICATE_FILE) == pair.certificate_pem and _read(folder / KEY_FILE) == pair.key_pem:
            return False
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / f"{_PAIR_PREFIX}{secrets.token_hex(8)}"
        made.mkdir(mode=0o700)
        _write(made / CERTIFICATE_FILE, pair.certificate_pem)
        _write(made / KEY_FILE, pair.key_pem)
        _lead(folder / _LINK, made.name)
        for name in (CERTIFICATE_FILE, KEY_FILE):
            _lead(folder / name, f"{_LINK}/{name}")
        for other in folder.glob(f"{_PAIR_PREFIX}*"):
            if other != made:
                shutil.rmtree(other, ignore_errors=True)
    except OSError as error:
        raise MooringError(
            ErrorKind.BAD_CONFIGURATION,
            f"the certificates cannot be written to {folder}: {error}",
            hint="with --self-managed the folder must be writable: an emptyDir, no Secret",
        ) from error
    return True


def serves_until(folder: Path) -> datetime | None:
    """When the certificate that lies there expires; None where there is none."""
    try:
        if not (folder / KEY_FILE).exists():
            return None
        return x509.load_pem_x509_certificate((folder / CERTIFICATE_FILE).read_bytes()).not_valid_after_utc
    except (OSError, ValueError):
        return None


def _read(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _lead(link: Path, target: str) -> None:
    """`link` to `target`, whatever it was, without a moment in which it is gone."""
    if link.is_symlink() and link.readlink() == Path(target):
        return
    made = link.with_name(f"{link.name}.{secrets.token_hex(4)}")
    made.symlink_to(target)
    made.replace(link)
