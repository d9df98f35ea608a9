"""HTTP to a machine's own metadata service: no proxies, no redirects, and limits on time and size.

Owns the connection and its errors. The modules of the clouds decide what to ask.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final

import aiohttp

from keepstep_agent.core.errors import ErrorKind, PreemptionSourceError
from keepstep_agent.core.settings.table import spelled

LINK_LOCAL_URL: Final = "http://169.254.169.254"
# The service is one hop away, so a slow answer means none.
ANSWER_SECONDS: Final = 2.0
_CONNECT_SECONDS: Final = 1.0
_ANSWER_LIMIT_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str
    at: float
    """Unix seconds by the service's clock if the answer has a date, else by this machine's."""

    def json(self) -> Any:
        """Decode the text as JSON. Raises PreemptionSourceError."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise not_understood(self.text) from error


class MetadataService:
    """An empty `url` means the address that all clouds share; one without a scheme is HTTP, as in GCE_METADATA_HOST."""

    def __init__(self, url: str = "", *, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self.url = (url if "://" in url else f"http://{url}").rstrip("/") if url else LINK_LOCAL_URL
        self._session: aiohttp.ClientSession | None = None

    async def request(
        self,
        path: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> Answer:
        """Return the answer, whatever its status. Raises PreemptionSourceError (UNREACHABLE) if none comes in time."""
        if self._session is None:
            self._session = aiohttp.ClientSession(trust_env=False)
        timeout = aiohttp.ClientTimeout(total=answer_seconds, sock_connect=_CONNECT_SECONDS)
        try:
            async with self._session.request(
                method, self.url + path, headers=headers, params=query, timeout=timeout, allow_redirects=False
            ) as response:
                text = await _text(response)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise PreemptionSourceError(
                ErrorKind.UNREACHABLE,
                f"the metadata service {self.url}{path} does not answer: {str(error) or type(error).__name__}",
                hint="allow the pod to reach its machine's metadata service, or set "
                f"{spelled('termination.preemption_source')} to off",
            ) from error
        return Answer(status=response.status, headers=response.headers, text=text, at=self._told_at(response.headers))

    def _told_at(self, headers: Mapping[str, str]) -> float:
        try:
            return unix_seconds(headers["Date"])
        except (KeyError, PreemptionSourceError):
            return self._wall()

    def refusal(self, path: str, answer: Answer, *, hint: str = "") -> PreemptionSourceError:
        """Return the error for a status that has no other meaning."""
        kind = ErrorKind.ACCESS_DENIED if answer.status in (401, 403) else ErrorKind.UNREACHABLE
        return PreemptionSourceError(
            kind,
            f"the metadata service {self.url}{path} answers {answer.status}",
            hint=hint or f"if this machine has no such service, set {spelled('termination.preemption_source')} to off",
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def not_understood(text: str) -> PreemptionSourceError:
    return PreemptionSourceError(
        ErrorKind.BAD_REQUEST,
        f"Keepstep cannot parse the metadata service's answer: {text[:80]!r}",
        hint="something else may answer at this address; set "
        f"{spelled('termination.preemption_endpoint')} to the metadata service's URL",
    )


def unix_seconds(date: object) -> float:
    """Convert a date as in HTTP, with or without its weekday. Raises PreemptionSourceError."""
    try:
        return parsedate_to_datetime(str(date)).timestamp()
    except ValueError as error:
        raise not_understood(str(date)) from error


async def _text(response: aiohttp.ClientResponse) -> str:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > _ANSWER_LIMIT_BYTES:
            raise ValueError(f"more than {_ANSWER_LIMIT_BYTES} bytes")
    return body.decode(errors="replace")
