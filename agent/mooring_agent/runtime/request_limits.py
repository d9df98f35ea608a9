"""Every request of the API against `core.limits`, before a method sees it.

Goes by the request's own description: a field that is new in `agent.proto` and has no limit yet is refused, whatever it
holds. Knows nothing of what a field means.
"""

import math
from typing import Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from mooring_agent.core.errors import ErrorKind, RequestError
from mooring_agent.core.limits import FILES_PER_RANK, REQUEST_NUMBERS, REQUEST_TEXTS

_CLOSED: Final = frozenset({FieldDescriptor.CPPTYPE_BOOL, FieldDescriptor.CPPTYPE_ENUM})
"""Types whose values are as many as the API knows; an enum's unknown one counts as unspecified."""


def check_request(request: Message) -> None:
    """Raises RequestError(BAD_REQUEST) that names the field and its limit."""
    for field, value in request.ListFields():
        if field.cpp_type in _CLOSED:
            continue
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            texts = [value] if isinstance(value, str) else value
            if len(texts) > FILES_PER_RANK:
                raise _refused(field, f"has {len(texts)} values", FILES_PER_RANK)
            longest = max(len(text.encode()) for text in texts)
            if longest > REQUEST_TEXTS.get(field.name, 0):
                raise _refused(field, f"has {longest} bytes", REQUEST_TEXTS.get(field.name, 0))
        # NaN is neither more nor less than anything.
        elif not math.isfinite(value) or not 0 <= value <= REQUEST_NUMBERS.get(field.name, 0):
            raise _refused(field, f"is {value}", REQUEST_NUMBERS.get(field.name, 0))


def _refused(field: FieldDescriptor, what: str, limit: int) -> RequestError:
    return RequestError(
        ErrorKind.BAD_REQUEST,
        f"{field.name} {what}, which makes no sense",
        hint=f"it may be 0 to {limit:,}",
    )
