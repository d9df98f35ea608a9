"""Maps errors to gRPC statuses with a google.rpc.ErrorInfo, and checks requests against `core.limits`.

Invariants: whatever a method raises is answered by such a status, and no method sees a request beyond the limits. The
check follows the request's descriptor, so that a new field of `agent.proto` without a limit is refused.
"""

import contextlib
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, NoReturn

import grpc
import structlog
from google.protobuf import any_pb2
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from keepstep_agent.core.errors import ErrorKind, KeepstepError, RequestError
from keepstep_agent.core.limits import REQUEST_LISTS, REQUEST_MESSAGES, REQUEST_NUMBERS, REQUEST_TEXTS
from keepstep_api.names import ERROR_DOMAIN, STATUS_DETAILS
from keepstep_api.v1 import agent_pb2

_CLOSED: Final = frozenset({FieldDescriptor.CPPTYPE_BOOL, FieldDescriptor.CPPTYPE_ENUM})
"""Types with a closed set of values, which need no limit. An enum's unknown value counts as unspecified."""


def check_request(request: Message) -> None:
    """Raise RequestError(BAD_REQUEST), which names the field and its limit, if a field is beyond its limit."""
    for field, value in request.ListFields():
        if field.cpp_type in _CLOSED:
            continue
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            if len(value) > REQUEST_MESSAGES.get(field.name, 0):
                raise _refused(field, f"has {len(value)} values", REQUEST_MESSAGES.get(field.name, 0))
            for one in value:
                check_request(one)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            texts = [value] if isinstance(value, str) else value
            if len(texts) > REQUEST_LISTS.get(field.name, 1):
                raise _refused(field, f"has {len(texts)} values", REQUEST_LISTS.get(field.name, 1))
            longest = max(len(text.encode()) for text in texts)
            if longest > REQUEST_TEXTS.get(field.name, 0):
                raise _refused(field, f"has {longest} bytes", REQUEST_TEXTS.get(field.name, 0))
        # NaN compares as false with any limit.
        elif not math.isfinite(value) or not 0 <= value <= REQUEST_NUMBERS.get(field.name, 0):
            raise _refused(field, f"is {value}", REQUEST_NUMBERS.get(field.name, 0))


def _refused(field: FieldDescriptor, what: str, limit: int) -> RequestError:
    return RequestError(
        ErrorKind.BAD_REQUEST,
        f"{field.name} {what}, beyond its limit",
        hint=f"allowed are 0 to {limit:,}",
    )


if TYPE_CHECKING:
    from grpc.aio import ServicerContext

_INVALID: Final = grpc.StatusCode.INVALID_ARGUMENT
_FAILED: Final = (grpc.StatusCode.ABORTED, agent_pb2.ERROR_REASON_CHECKPOINT_FAILED)

STATUS: Final[dict[ErrorKind, tuple[grpc.StatusCode, agent_pb2.ErrorReason]]] = {
    ErrorKind.PATH_OUTSIDE_VOLUME: (_INVALID, agent_pb2.ERROR_REASON_PATH_OUTSIDE_VOLUME),
    ErrorKind.FILE_MISSING: (grpc.StatusCode.NOT_FOUND, agent_pb2.ERROR_REASON_PATH_MISSING),
    ErrorKind.CHECKPOINT_EMPTY: (_INVALID, agent_pb2.ERROR_REASON_CHECKPOINT_EMPTY),
    ErrorKind.BAD_NAME: (_INVALID, agent_pb2.ERROR_REASON_BAD_NAME),
    ErrorKind.CONTRADICTION: (grpc.StatusCode.FAILED_PRECONDITION, agent_pb2.ERROR_REASON_CONTRADICTION),
    ErrorKind.BAD_REQUEST: (_INVALID, agent_pb2.ERROR_REASON_BAD_REQUEST),
    ErrorKind.TOO_MANY_CALLS: (grpc.StatusCode.UNAVAILABLE, agent_pb2.ERROR_REASON_TOO_MANY_CALLS),
    ErrorKind.UNKNOWN_SAVE: (grpc.StatusCode.NOT_FOUND, agent_pb2.ERROR_REASON_UNKNOWN_SAVE),
    ErrorKind.CHECKPOINT_FAILED: _FAILED,
    ErrorKind.VOLUME_UNUSABLE: (grpc.StatusCode.UNAVAILABLE, agent_pb2.ERROR_REASON_VOLUME_UNUSABLE),
    ErrorKind.DISK_FULL: (grpc.StatusCode.RESOURCE_EXHAUSTED, agent_pb2.ERROR_REASON_VOLUME_UNUSABLE),
    ErrorKind.CHECKPOINT_CORRUPT: (grpc.StatusCode.DATA_LOSS, agent_pb2.ERROR_REASON_CHECKPOINT_DAMAGED),
    ErrorKind.SHUTTING_DOWN: (grpc.StatusCode.UNAVAILABLE, agent_pb2.ERROR_REASON_SHUTTING_DOWN),
}
"""The kinds with a status of their own; any other kind is why a checkpoint failed."""


_INTERNAL: Final = (grpc.StatusCode.INTERNAL, agent_pb2.ERROR_REASON_UNSPECIFIED)
_METHODS: Final = f"/{agent_pb2.DESCRIPTOR.services_by_name['Agent'].full_name}/"

log = structlog.get_logger("keepstep.api")


def status_of(error: Exception) -> status_pb2.Status:
    """Return the google.rpc.Status of an error, with its reason and hint; INTERNAL for a bug of our own."""
    if isinstance(error, KeepstepError):
        (code, reason), kind, hint = STATUS.get(error.kind, _FAILED), error.kind.value, error.hint
    else:
        (code, reason), kind, hint = _INTERNAL, "internal", "this is a bug: please report it with the log"
    detail = any_pb2.Any()
    detail.Pack(
        error_details_pb2.ErrorInfo(
            reason=agent_pb2.ErrorReason.Name(reason).removeprefix("ERROR_REASON_"),
            domain=ERROR_DOMAIN,
            metadata={"hint": hint, "kind": kind},
        )
    )
    message = f"{error} ({hint})" if hint else str(error)
    return status_pb2.Status(code=code.value[0], message=message, details=[detail])


class ErrorsAnswered(grpc.aio.ServerInterceptor):
    """Wraps every method of our own service: checks the request, and ends the call with what the method raises."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_METHODS):
            return handler
        codecs = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_streaming(handler.unary_stream), **codecs)
        return grpc.unary_unary_rpc_method_handler(_answering(handler.unary_unary), **codecs)


def _answering(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def answer(request: Any, context: "ServicerContext[Any, Any]") -> Any:
        try:
            check_request(request)
            return await method(request, context)
        except Exception as error:
            await end_call(context, error)

    return answer


def _streaming(method: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., AsyncGenerator[Any, None]]:
    async def stream(request: Any, context: "ServicerContext[Any, Any]") -> AsyncGenerator[Any, None]:
        async with contextlib.aclosing(method(request, context)) as answers:
            try:
                check_request(request)
                async for answer in answers:
                    yield answer
            except Exception as error:
                await end_call(context, error)

    return stream


async def end_call(context: "ServicerContext[Any, Any]", error: Exception) -> NoReturn:
    """End a call with the status of an error."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, KeepstepError):
        log.exception("api.failed", exc_info=error)
    status = status_of(error)
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    await context.abort(code, status.message, trailing_metadata=((STATUS_DETAILS, status.SerializeToString()),))
    raise AssertionError("abort raises")
