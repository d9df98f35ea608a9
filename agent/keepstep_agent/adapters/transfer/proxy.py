"""Chooses the proxy of a request by the usual variables of the environment: one answer for all that the agent sends.

botocore decides once for each client and by the names of hosts alone. Cluster networks are named as CIDR in NO_PROXY,
which curl, Go and httpx honour.
"""

import re
from ipaddress import ip_address, ip_network
from typing import Final
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

_PORTS: Final = {"http": 80, "https": 443}


def proxy_for(url: str) -> str | None:
    """Return the URL of the proxy for a request: that of HTTP_PROXY or HTTPS_PROXY, unless NO_PROXY names its host.

    NO_PROXY has domains, which stand for their subdomains too, addresses, networks as CIDR, `host:port`, or `*`.
    """
    target = urlsplit(url)
    proxies = getproxies_environment()
    proxy = proxies.get(target.scheme, "")
    port = target.port or _PORTS.get(target.scheme, 0)
    if not proxy or any(
        _names(entry, target.hostname or "", port) for entry in re.split(r"[,\s]+", proxies.get("no", ""))
    ):
        return None
    return proxy if "://" in proxy else f"http://{proxy.removeprefix('//')}"


def _names(entry: str, host: str, port: int) -> bool:
    """Whether an entry of NO_PROXY stands for a host."""
    if entry == "*":
        return True
    found = re.fullmatch(r"(\[[^]]+\]|[^:]+):(\d+)", entry)
    if found:
        entry = found[1]
        if int(found[2]) != port:
            return False
    try:
        return ip_address(host) in ip_network(entry.strip("[]"), strict=False)
    except ValueError:
        domain = entry.lower().removeprefix("*").strip(".")
        host = host.lower().rstrip(".")
        return bool(domain) and (host == domain or host.endswith(f".{domain}"))
