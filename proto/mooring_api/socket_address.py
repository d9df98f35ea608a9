"""How gRPC is told where the agent's unix socket is: one way for everyone who serves or calls there."""

import os
from pathlib import Path
from urllib.parse import quote


def socket_address(socket: Path | str) -> str:
    """gRPC reads it as a URI: a `#`, `?` or `%` of the path must be quoted, or another file is meant."""
    return f"unix:{quote(os.fsencode(socket))}"
