"""What this machine's loopback has."""

import socket
from typing import Final

import pytest


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6: Final = pytest.mark.skipif(not _has_ipv6(), reason="this machine's loopback has no IPv6 address")
