"""The HTTP session below botocore: it follows no redirect, reads no answer without a bound, and sends nothing twice.

A redirect would carry the request's bytes and X-Amz-Security-Token to whatever host the answer names, even over plain
HTTP. botocore makes sessions of its own for credentials (metadata services, STS, IAM Identity Center), which no client
setting reaches. So this module patches aiobotocore's class itself, once, when it is imported.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from importlib.metadata import version
from typing import Any, Final, Self

import aiohttp
from aiobotocore.httpsession import AIOHTTPSession
from botocore.exceptions import ClientError

from keepstep_agent.adapters.s3.errors import OversizedAnswerError, redirect_details
from keepstep_agent.adapters.transfer.tls_connector import use_own_tls
from keepstep_agent.core.errors import ErrorKind, StoreError

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


class _OneAttemptSession(AIOHTTPSession):  # type: ignore[misc]  # aiobotocore has no types
    """A session that uses our TLS and makes one attempt per request.

    aiohttp silently repeats a PUT whose connection broke. A conditional put would then refuse our own write. There is
    no public switch; a test counts the requests.
    """

    async def _get_session(self, proxy_url: str | None) -> _GuardedSession:
        guarded: _GuardedSession = await super()._get_session(proxy_url)
        guarded.session._retry_connection = False
        if not (proxy_url or "").startswith("https:"):
            connector = guarded.session.connector
            _require("aiohttp", aiohttp.TCPConnector, "_loop", found=hasattr(connector, "_loop"))
            use_own_tls(connector)
        return guarded


class StoreSession(_OneAttemptSession):
    """The store's session, with a second one inside that keeps no connections.

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
