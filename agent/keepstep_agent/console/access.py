"""Who may see the pages: whoever has the token or comes through a trusted proxy; without either, this machine alone.

Owns the session cookie, the rate of wrong tokens and the headers of every answer. The cookie holds a time and its HMAC
by a key that is derived from the token: it is not the token, ends by itself, and counts for all replicas that have the
same token.
"""

import asyncio
import hashlib
import hmac
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import Final

import structlog
from aiohttp import web

from keepstep_agent.console.settings import LEAST_TOKEN_CHARACTERS, ConsoleSettings
from keepstep_agent.core.errors import ErrorKind, KeepstepError, printable

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger("keepstep.console")

COOKIE: Final = "keepstep-console"
_SESSION_SECONDS: Final = 12 * 3600
_LOOK_SECONDS: Final = 5.0
_MOST_TOKEN_BYTES: Final = 4096
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
_MOST_WRONG: Final = 10
_WRONG_SECONDS: Final = 6.0
"""So many wrong tokens an address may give at once, and one more after so many seconds."""
_MOST_WRONG_OF_ALL: Final = 100
_WRONG_OF_ALL_SECONDS: Final = 0.5
_MOST_ADDRESSES: Final = 1_000
_KEY_ROUNDS: Final = 600_000
"""Of a guess at the token by the cookie that it would give: a fifth of a second. No limit may keep a cookie out."""
USER: Final = web.RequestKey("user", str)
SIGNED_IN: Final = web.RequestKey("signed_in", bool)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def add_headers(_: web.Request, answer: web.StreamResponse) -> None:
    """Handle aiohttp's signal before each answer, also of errors."""
    answer.headers.update(_HEADERS)


class TooManyTokensError(Exception):
    """Too many wrong tokens were given; no other is looked at for `wait_seconds`."""

    def __init__(self, wait_seconds: int) -> None:
        super().__init__(f"too many wrong tokens, wait {wait_seconds} s")
        self.wait_seconds = wait_seconds


class WrongTokens:
    """Bounds how fast tokens can be tried: by one address, and by all together. `clock` returns seconds, monotonic.

    Each has an allowance of wrong tokens, which comes back with time. Whoever has used it up is refused without a look
    at the token.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._whole_at: OrderedDict[str, float] = OrderedDict()
        """When the whole allowance of an address is back, the one that was counted last at the end."""
        self._whole_for_all_at = 0.0

    def check(self, address: str) -> None:
        """Raise TooManyTokensError if this address has no allowance left, or all together have none."""
        now = self._clock()
        own_seconds = self._whole_at.get(address, 0.0) - now - (_MOST_WRONG - 1) * _WRONG_SECONDS
        all_seconds = self._whole_for_all_at - now - (_MOST_WRONG_OF_ALL - 1) * _WRONG_OF_ALL_SECONDS
        wait_seconds = math.ceil(max(own_seconds, all_seconds))
        if wait_seconds > 0:
            raise TooManyTokensError(wait_seconds)

    def add(self, address: str) -> None:
        """Count a wrong token."""
        now = self._clock()
        self._whole_at[address] = max(now, self._whole_at.pop(address, 0.0)) + _WRONG_SECONDS
        self._whole_for_all_at = max(now, self._whole_for_all_at) + _WRONG_OF_ALL_SECONDS
        if len(self._whole_at) > _MOST_ADDRESSES:
            self._whole_at.popitem(last=False)


class Access:
    """Decides about requests. `clock` returns unix seconds."""

    def __init__(self, settings: ConsoleSettings, *, clock: Callable[[], float] = time.time) -> None:
        self._token_file = settings.token_file
        self._header = settings.user_header
        self._proxies = settings.trusted_proxies
        self._clock = clock
        self._token = settings.token.encode()
        self._key = _key_of(self._token)
        self._wrong = WrongTokens()

    @property
    def has_token(self) -> bool:
        return bool(self._token)

    async def keep_token(self) -> None:
        """Read the token's file again and again, for ever. A token that cannot be used leaves the last one as it is."""
        assert self._token_file is not None
        problem = ""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                token = await asyncio.to_thread(read_token, self._token_file)
            except KeepstepError as error:
                if str(error) != problem:
                    _log.error("token.unusable", error=str(error), hint=error.hint)
                problem = str(error)
                continue
            problem = ""
            if token.encode() != self._token:
                key = await asyncio.to_thread(_key_of, token.encode())
                self._token, self._key = token.encode(), key
                _log.info("token.renewed")

    def user_of(self, request: web.Request) -> str | None:
        """Return who asks, empty if nobody says it; None if they may not see anything. Raises TooManyTokensError."""
        if not self._token and not self._header:
            # A page of another site could else read ours, under a name that it resolves to this machine.
            return "" if is_loopback(request.url.host or "") else None
        if self._header and self._from_proxy(request):
            user = request.headers.get(self._header, "").strip()
            if user:
                return printable(user)[:_MOST_USER_CHARACTERS]
        if self._token and (self._is_session(request.cookies.get(COOKIE, "")) or self._has_bearer(request)):
            return ""
        return None

    def is_token(self, given: str, request: web.Request) -> bool:
        """Whether this is the token; takes the same time whatever differs. Raises TooManyTokensError."""
        if not self.has_token:
            return False
        address = self._address(request)
        self._wrong.check(address)
        is_token = hmac.compare_digest(given.strip().encode(errors="replace"), self._token)
        if not is_token:
            self._wrong.add(address)
        return is_token

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
        address = _parsed_address(request.remote or "")
        return address is not None and any(address in network for network in self._proxies)

    def _address(self, request: web.Request) -> str:
        """Return who is to be counted: the client, or what a trusted proxy says of it. Of IPv6 its network."""
        # A proxy may add a line of its own after those of the client.
        said = ",".join(request.headers.getall("X-Forwarded-For", ())).rpartition(",")[2].strip()
        address = (_parsed_address(said) if self._from_proxy(request) else None) or _parsed_address(
            request.remote or ""
        )
        return str(ip_network((int(address), 64), strict=False)) if isinstance(address, IPv6Address) else str(address)

    def _has_bearer(self, request: web.Request) -> bool:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self.is_token(given, request)

    def _is_session(self, cookie: str) -> bool:
        until, _, signature = cookie.partition(".")
        right = hmac.compare_digest(signature.encode(errors="replace"), self._signature(until).encode())
        return right and until.isdecimal() and self._clock() < int(until)

    def _signature(self, until: str) -> str:
        return hmac.new(self._key, until.encode(errors="replace"), hashlib.sha256).hexdigest()


def read_token(file: Path) -> str:
    """Read the token that lets people in. Raises KeepstepError."""
    try:
        with file.open("rb") as content:
            token = content.read(_MOST_TOKEN_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise KeepstepError(
            ErrorKind.BAD_CONFIGURATION,
            f"--token-file {file}: {error}",
            hint="make it with: openssl rand -hex 32",
        ) from error
    if len(token) < LEAST_TOKEN_CHARACTERS:
        raise KeepstepError(
            ErrorKind.BAD_CONFIGURATION,
            f"--token-file {file}: the token has {len(token)} characters, fewer than {LEAST_TOKEN_CHARACTERS}",
            hint="make it with: openssl rand -hex 32",
        )
    return token


def _key_of(token: bytes) -> bytes:
    """Return the key of the session cookies. It takes long, so that no cookie can be guessed."""
    return hashlib.pbkdf2_hmac("sha256", token, b"keepstep-console", _KEY_ROUNDS) if token else b""


def _parsed_address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback(host: str) -> bool:
    """Whether an address, or the name in a URL, is this machine alone."""
    if host in ("localhost", "localhost."):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
