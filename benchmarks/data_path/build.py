"""Compiles the two C programs. Needs a C compiler and OpenSSL's headers."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SOURCES: Final = Path(__file__).parent
_COMPILE_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    server: Path
    limits: Path


def build(directory: Path) -> Programs:
    """RuntimeError with what the compiler said if it cannot."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError("no C compiler: install cc and the headers of OpenSSL (Debian: gcc libssl-dev)")
    built = {}
    for name in ("server", "limits"):
        built[name] = directory / name
        command = [compiler, "-O2", "-w", "-o", str(built[name]), str(_SOURCES / f"{name}.c")]
        result = subprocess.run(
            [*command, "-lssl", "-lcrypto", "-lpthread"], capture_output=True, text=True, timeout=_COMPILE_SECONDS
        )
        if result.returncode:
            raise RuntimeError(f"{name}.c: {result.stderr[-2000:]}")
    return Programs(**built)
