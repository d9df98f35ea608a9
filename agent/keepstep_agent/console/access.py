"""Who may see the pages: whoever has the token or comes through a trusted proxy; without either, this machine alone.

Owns the session cookie and the headers of every answer. The cookie holds a time and its HMAC by a key that is derived
from the token: it is not the token, ends by itself, and counts for all replicas that have the same token.
"""

import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from typing import Final

from aiohttp import web

from keepstep_agent.console.settings import ConsoleSettings
from keepstep_agent.core.errors import printable

COOKIE: Final = "keepstep-console"
_SESSION_SECONDS: Final = 12 * 3600
_MOST_USER_CHARACTERS: Final = 100
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Server": "keepstep",
}
USER: Final = web.RequestKey("user", str)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def add_headers(_: web.Request, answer: web.StreamResponse) -> None:
    """Handle aiohttp's signal before each answer, also of errors."""
    answer.headers.update(_HEADERS)


class Access:
    """Decides about requests. `clock` returns unix seconds."""

    def __init__(self, settings: ConsoleSettings, *, clock: Callable[[], float] = time.time) -> None:
        self._token = settings.token.encode()
        self._header = settings.user_header
        self._proxies = settings.trusted_proxies
        self._clock = clock
        self._key = hashlib.sha256(b"keepstep-console\0" + self._token).digest()

    @property
    def has_token(self) -> bool:
        return bool(self._token)

    def user_of(self, request: web.Request) -> str | None:
        """Return who asks, empty if nobody says it; None if they may not see anything."""
        if not self._token and not self._header:
            # A page of another site could else read ours, under a name that it resolves to this machine.
            return "" if is_loopback(request.url.host or "") else None
        if self._header and self._from_proxy(request):
            user = request.headers.get(self._header, "").strip()
            if user:
                return printable(user)[:_MOST_USER_CHARACTERS]
        if self._token and (self._has_bearer(request) or self._is_session(request.cookies.get(COOKIE, ""))):
            return ""
        return None

    def is_token(self, given: str) -> bool:
        """Whether this is the token; takes the same time whatever differs."""
        return self.has_token and hmac.compare_digest(given.strip().encode(errors="replace"), self._token)

    def sign_in(self, request: web.Request, answer: web.Response) -> None:
        """Give the browser a session."""
        until = str(int(self._clock()) + _SESSION_SECONDS)
        answer.set_cookie(
            COOKIE,
            f"{until}.{self._signature(until)}",
            max_age=_SESSION_SECONDS,
            httponly=True,
            samesite="Strict",
            # Who lies about this leaves out the attribute of their own cookie.
            secure=request.headers.get("X-Forwarded-Proto", request.scheme) == "https",
        )

    def sign_out(self, answer: web.Response) -> None:
        answer.del_cookie(COOKIE, httponly=True, samesite="Strict")

    def _from_proxy(self, request: web.Request) -> bool:
        try:
            address = ip_address(request.remote or "")
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None) or address
        return any(mapped in network for network in self._proxies)

    def _has_bearer(self, request: web.Request) -> bool:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self.is_token(given)

    def _is_session(self, cookie: str) -> bool:
        until, _, signature = cookie.partition(".")
        right = hmac.compare_digest(signature.encode(errors="replace"), self._signature(until).encode())
        return right and until.isdecimal() and self._clock() < int(until)

    def _signature(self, until: str) -> str:
        return hmac.new(self._key, until.encode(errors="replace"), hashlib.sha256).hexdigest()


def is_loopback(host: str) -> bool:
    """Whether an address, or the name in a URL, is this machine alone."""
    if host in ("localhost", "localhost."):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
