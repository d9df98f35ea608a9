"""The HTTP session below botocore: it follows no redirect, reads no answer without a bound, and sends nothing twice.

It chooses the proxy of each request as all that the agent sends does.

A redirect would carry the request's bytes and X-Amz-Security-Token to whatever host the answer names, even over plain
HTTP. botocore makes sessions of its own for credentials (metadata services, STS, IAM Identity Center), which no client
setting reaches. So this module patches aiobotocore's class itself, once, when it is imported.
"""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from importlib.metadata import version
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

import aiobotocore.httpsession
import aiohttp
import structlog
from aiobotocore.httpsession import AIOHTTPSession
from botocore.exceptions import ClientError, SSLError
from botocore.httpsession import ProxyConfiguration

from keepstep_agent.adapters.s3.errors import OversizedAnswerError, redirect_details
from keepstep_agent.adapters.s3.renewal import Renewal
from keepstep_agent.adapters.transfer.proxy import proxy_for
from keepstep_agent.adapters.transfer.tls_connector import use_own_tls
from keepstep_agent.core.errors import ErrorKind, StoreError

logger = structlog.get_logger(__name__)

ANSWER_LIMIT_BYTES: Final = 4 * 1024 * 1024
"""The limit on answers that are read whole. A page of 1,000 keys of 1,024 bytes each, all escaped, is smaller."""


_NEW_CONNECTION: Final = ContextVar("new_connection", default=False)


@contextmanager
def over_a_new_connection() -> Iterator[None]:
    """Give each request to the store that is made in this context a connection of its own."""
    token = _NEW_CONNECTION.set(True)
    try:
        yield
    finally:
        _NEW_CONNECTION.reset(token)


class _GuardedSession:
    """An aiohttp session as aiobotocore uses it, without redirects and with bounded reads."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def request(self, method: str, **options: Any) -> aiohttp.ClientResponse:
        response = await self.session.request(method, allow_redirects=False, **options)
        # botocore reads listings and errors through this. We read the bodies of objects ourselves, piece by piece.
        response.read = partial(_read_bounded, response)  # type: ignore[method-assign]  # that is the point
        return response


class _ProxyOfEach(ProxyConfiguration):  # type: ignore[misc]  # botocore has no types
    """Chooses a proxy by the URL of the request. botocore's choice is made once, by the client's endpoint."""

    def proxy_url_for(self, url: str) -> str | None:
        # The services that give credentials are at such addresses. A proxy has others, and would see the keys.
        return None if _is_of_this_machine(urlsplit(url).hostname or "") else proxy_for(url)


class _ProxyOfStore(ProxyConfiguration):  # type: ignore[misc]  # as above
    """Chooses a proxy for the store, which may be anywhere."""

    def proxy_url_for(self, url: str) -> str | None:
        return proxy_for(url)


_AWS_METADATA: Final = ip_network("fd00:ec2::/32")


def _is_of_this_machine(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_link_local or address in _AWS_METADATA


class _OneAttemptSession(AIOHTTPSession):  # type: ignore[misc]  # aiobotocore has no types
    """A session that uses our TLS and makes one attempt per request.

    aiohttp silently repeats a PUT whose connection broke. A conditional put would then refuse our own write. There is
    no public switch; a test counts the requests.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        _require("aiobotocore", AIOHTTPSession, "_proxy_config", found=hasattr(self, "_proxy_config"))
        self._proxy_config = _ProxyOfStore()

    async def _get_session(self, proxy_url: str | None) -> _GuardedSession:
        guarded: _GuardedSession = await super()._get_session(proxy_url)
        guarded.session._retry_connection = False
        if not (proxy_url or "").startswith("https:"):
            connector = guarded.session.connector
            _require("aiohttp", aiohttp.TCPConnector, "_loop", found=hasattr(connector, "_loop"))
            use_own_tls(connector)
        return guarded


class _SessionPair(_OneAttemptSession):
    """A session with a second one inside that keeps no connections.

    A second client instead would cost half a second.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._keeps_none = _OneAttemptSession(**{**options, "connector_args": {"force_close": True}})

    async def __aenter__(self) -> Self:
        await self._keeps_none.__aenter__()
        await super().__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        try:
            await super().__aexit__(*exception)
        finally:
            await self._keeps_none.__aexit__(*exception)

    async def send(self, request: Any) -> Any:
        if _NEW_CONNECTION.get():
            return await self._keeps_none.send(request)
        return await super().send(request)


class StoreSession:
    """The store's session. When the CA bundle's file changes, new connections are verified by what it says then.

    Requests that have begun keep their connections. The sessions before the last change are closed at the next one.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._newest = _SessionPair(**options)
        self._older: _SessionPair | None = None
        verify = options.get("verify")
        self._bundle = Path(verify) if isinstance(verify, str) else None
        self._authorities = b""
        if self._bundle is not None:
            # Where it cannot be read, the first request says so.
            with suppress(OSError):
                self._authorities = self._bundle.read_bytes()
        self._changed = False
        self._problem = ""
        self._renewal = Renewal(self._read_bundle, "keepstep-authorities")

    async def __aenter__(self) -> Self:
        await self._newest.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._renewal.close()
        try:
            if self._older is not None:
                await self._older.__aexit__(*exception)
        finally:
            await self._newest.__aexit__(*exception)

    async def close(self) -> None:
        await self.__aexit__(None, None, None)

    async def send(self, request: Any) -> Any:
        if self._bundle is None:
            return await self._newest.send(request)
        self._renewal.look()
        await self._follow_bundle()
        try:
            return await self._newest.send(request)
        except SSLError:
            # The next attempt is made with what the bundle says now.
            await self._renewal.read_now()
            raise

    async def _follow_bundle(self) -> None:
        if self._changed:
            self._changed = False
            fresh = _SessionPair(**self._options)
            await fresh.__aenter__()
            oldest, self._older, self._newest = self._older, self._newest, fresh
            if oldest is not None:
                await oldest.close()

    def _read_bundle(self, _refused: bool) -> None:
        assert self._bundle is not None
        try:
            authorities = self._bundle.read_bytes()
            if authorities == self._authorities:
                return
            ssl.create_default_context(cafile=self._bundle)
        except OSError as error:
            problem = error.strerror or str(error)
            if problem != self._problem:
                logger.warning("ca_bundle.unusable", path=str(self._bundle), error=problem)
            self._problem = problem
            return
        self._authorities, self._changed, self._problem = authorities, True, ""
        logger.info("ca_bundle.renewed", path=str(self._bundle))


def refuse_redirects(client: Any) -> None:
    """Turn every redirect from the store into a ClientError, and keep botocore from looking for another region."""
    client.meta.events.register("before-call.s3", _stay_here)
    client.meta.events.register("before-parse.s3", _refuse_redirect)


def _stay_here(context: dict[str, Any], **_: object) -> None:
    # botocore's redirector asks where the bucket is and sends the request there, unless this says that it has done so.
    context.setdefault("s3_redirect", {})["redirected"] = True


def _refuse_redirect(response_dict: dict[str, Any], operation_model: Any, **_: object) -> None:
    """Raise before the answer is parsed: a proxy's redirect is an HTML page, and botocore takes a 300 for success."""
    status = response_dict["status_code"]
    if 300 <= status < 400:
        headers = response_dict["headers"]
        raise ClientError(
            {
                "Error": redirect_details(headers, response_dict["body"]),
                "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": dict(headers)},
            },
            operation_model.name,
        )


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    try:
        async for piece in response.content.iter_any():
            body += piece
            if len(body) > ANSWER_LIMIT_BYTES:
                raise OversizedAnswerError(f"it has more than {ANSWER_LIMIT_BYTES} bytes")
    except BaseException:
        response.close()
        raise
    return bytes(body)


def require_internals() -> None:
    """Check for the private members of libraries that are used here and in `tls_connector`. Raises StoreError.

    A connector's `_loop` is only there once it is made, and is checked then.
    """
    for package, owner, name in (
        ("aiobotocore", AIOHTTPSession, "_get_session"),
        ("botocore", ProxyConfiguration, "proxy_url_for"),
        ("aiohttp", aiohttp.ClientSession, "_retry_connection"),
        ("aiohttp", aiohttp.TCPConnector, "_wrap_create_connection"),
    ):
        # aiohttp lists the attributes of instances.
        _require(package, owner, name, found=hasattr(owner, name) or name in getattr(owner, "ATTRS", ()))


def _require(package: str, owner: type, name: str, *, found: bool) -> None:
    if not found:
        raise StoreError(
            ErrorKind.BAD_CONFIGURATION,
            f"{package} {version(package)} has no {owner.__name__}.{name}, which Keepstep relies on",
            hint=f"install the version of {package} that Keepstep's constraints.txt names, and report this",
        )


require_internals()
_make_session: Final = AIOHTTPSession._get_session


async def _get_guarded_session(self: Any, proxy_url: str | None) -> _GuardedSession:
    return _GuardedSession(await _make_session(self, proxy_url))


AIOHTTPSession._get_session = _get_guarded_session
aiobotocore.httpsession.ProxyConfiguration = _ProxyOfEach
