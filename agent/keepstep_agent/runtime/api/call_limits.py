"""Bounds how many calls are open at once, method by method, so that calls of one method never take another's room.

A call holds some 25 KiB while it is open, whatever it waits for. It counts from its first byte to its end. One beyond
the limit is refused before its request is read. Requests, which may be large, are read two at a time, and one that
does not arrive in time is refused too: a caller that stops in the midst of it holds memory for a moment only.
"""

import asyncio
import contextlib
import inspect
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import grpc
import structlog

from keepstep_agent.core.errors import ErrorKind, KeepstepError, RequestError
from keepstep_agent.core.limits import LOCAL_RANKS
from keepstep_agent.runtime.api.errors import end_call
from keepstep_api.v1 import agent_pb2

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

_METHODS: Final = f"/{agent_pb2.DESCRIPTOR.services_by_name['Agent'].full_name}/"
_SHORT: Final = "calls that wait for nothing"
_OTHER: Final = "health and reflection"
_MOST_OPEN: Final[Mapping[str, int]] = {
    # A process of each local rank waits in these.
    "Attach": LOCAL_RANKS,
    "AnnounceCheckpoint": LOCAL_RANKS,
    "WaitCommitted": LOCAL_RANKS // 2,
    "ListRestorable": LOCAL_RANKS // 2,
    "Fetch": LOCAL_RANKS // 2,
    # For people.
    "WatchStatus": 64,
    _SHORT: LOCAL_RANKS // 2,
    _OTHER: 64,
}
"""By method, or by a group of methods that share a limit."""
_MOST_RECEIVING: Final = 2
"""How many requests of a method are read at once. Each may have the 4 MiB that gRPC allows."""
_RECEIVE_SECONDS: Final = 5.0
_BETWEEN_LINES_SECONDS: Final = 60.0

SERVER_OPTIONS: Final = (
    # Connections cost 15 KiB each. One without a call is closed, and its client connects again when it calls.
    ("grpc.max_allowed_incoming_connections", LOCAL_RANKS + LOCAL_RANKS // 2),
    ("grpc.max_connection_idle_ms", 5_000),
    ("grpc.server_handshake_timeout_ms", 5_000),
    # Calls of one connection that are refused, and whose refusals nobody reads. More calls wait in their client.
    ("grpc.max_concurrent_streams", 64),
    # While more calls than these wait to be looked at, gRPC cancels some at random. The default is a thousand.
    ("grpc.server.max_pending_requests", 4_000),
    ("grpc.server.max_pending_requests_hard_limit", 8_000),
    ("grpc.max_metadata_size", 4 * 1024),
    ("grpc.absolute_max_metadata_size", 8 * 1024),
    # What is buffered of a request that waits to be read does not grow.
    ("grpc.http2.bdp_probe", 0),
)

log = structlog.get_logger("keepstep.api")


class CallsLimited(grpc.aio.ServerInterceptor):
    """Counts the calls of every method, also of other services, and reads their requests."""

    def __init__(self, most_open: Mapping[str, int] = _MOST_OPEN, receive_seconds: float = _RECEIVE_SECONDS) -> None:
        self._most_open = most_open
        self._receive_seconds = receive_seconds
        self._open: Counter[str] = Counter()
        self._receiving = {group: asyncio.Semaphore(_MOST_RECEIVING) for group in most_open}
        self._told_at = float("-inf")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        name = handler_call_details.method.removeprefix(_METHODS)
        group = name if name in self._most_open else _OTHER if name.startswith("/") else _SHORT
        # As a stream of requests, whose handler is called before any of them is read.
        made = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return made(
            self._limited(group, handler),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _limited(self, group: str, handler: Any) -> Callable[..., Any]:
        method = handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary

        async def answer(requests: Any, context: "ServicerContext[Any, Any]") -> Any:
            with self._counted(group) as is_admitted:
                request = await self._request(is_admitted, group, handler, requests, context)
                return await method(request, context)

        async def stream(requests: Any, context: "ServicerContext[Any, Any]") -> AsyncGenerator[Any, None]:
            with self._counted(group) as is_admitted:
                request = await self._request(is_admitted, group, handler, requests, context)
                async with contextlib.aclosing(method(request, context)) as answers:
                    async for one in answers:
                        yield one

        return stream if inspect.isasyncgenfunction(method) else answer

    @contextlib.contextmanager
    def _counted(self, group: str) -> Iterator[bool]:
        """Count a call while the context is open. Yields whether there is room for it."""
        is_admitted = self._open[group] < self._most_open[group]
        self._open[group] += is_admitted
        try:
            yield is_admitted
        finally:
            self._open[group] -= is_admitted

    async def _request(
        self, is_admitted: bool, group: str, handler: Any, requests: Any, context: "ServicerContext[Any, Any]"
    ) -> Any:
        """Return the request, or all of them if the method takes several. Ends the call if there is none to serve."""
        try:
            if not is_admitted:
                self._tell_refused(group)
                raise RequestError(
                    ErrorKind.TOO_MANY_CALLS,
                    f"{group}: {self._most_open[group]} calls are open, and more may not be",
                    hint="end calls that you do not need, or call again later",
                )
            return requests if handler.request_streaming else await self._receive(group, context)
        except KeepstepError as error:
            await end_call(context, error)

    async def _receive(self, group: str, context: "ServicerContext[Any, Any]") -> Any:
        async with self._receiving[group]:
            try:
                async with asyncio.timeout(self._receive_seconds):
                    request = await context.read()
            except TimeoutError:
                raise RequestError(
                    ErrorKind.BAD_REQUEST,
                    f"the request did not arrive within {self._receive_seconds:g} s",
                    hint="send the request with its call",
                ) from None
        if request is grpc.aio.EOF:
            raise RequestError(ErrorKind.BAD_REQUEST, "the call has no request", hint="send one request with each call")
        return request

    def _tell_refused(self, group: str) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._told_at + _BETWEEN_LINES_SECONDS:
            self._told_at = now
            log.warning(
                "api.too_many_calls",
                calls=group,
                open=self._open[group],
                hint="a program in the pod opens calls and does not end them",
            )
