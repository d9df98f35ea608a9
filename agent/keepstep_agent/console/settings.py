"""What the console's options set, and its limits."""

from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Final

MOST_CONNECTIONS: Final = 256
ASK_SECONDS: Final = 30.0
"""How long a connection may take for a request, and an answer until it is taken."""
FINISH_SECONDS: Final = 5.0
MOST_FORM_BYTES: Final = 16 * 1024
MOST_RUNS: Final = 10_000
"""How many runs are shown: the first by name."""
LEAST_TOKEN_CHARACTERS: Final = 16
MOST_KEPT_BYTES: Final = 32 * 1024 * 1024
"""What all ledgers may take between two refreshes. The largest are forgotten, and read whole when they change."""
ROWS: Final = 100
"""How many runs one page shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleSettings:
    """`token` and `user_header` are empty if they let nobody in. `trusted_proxies` may set the header.

    `token_file` is where the token came from, and later ones come from.
    """

    destination: str
    address: tuple[str, int] = ("127.0.0.1", 8400)
    token: str = field(default="", repr=False)
    token_file: Path | None = None
    user_header: str = ""
    trusted_proxies: tuple[IPv4Network | IPv6Network, ...] = ()
    refresh_seconds: float = 30.0
    abandoned_after_seconds: float = 7 * 24 * 3600.0
