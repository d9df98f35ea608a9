"""Strangers that hold the webhook's connections and memory, against the real process: it answers honest reviews, and
stays below the memory limit that the chart gives it."""

import asyncio
import contextlib
import gzip
import http.client
import json
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from tests.chart.rendering import of_kind, render
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.webhook_process import WebhookProcess, review_of, training_pod

from keepstep_agent.webhook.settings import MOST_BODY_BYTES, MOST_CONNECTIONS, MOST_PROBES, SMALL_BODY_BYTES

_MIB = 1024 * 1024
_HONEST_REVIEWS = 5
_MANY = MOST_CONNECTIONS + 60
_OWN_DESCRIPTORS = 32
"""Listening sockets, the event loop's, the log."""


@pytest.fixture
def webhook(tmp_path: Path) -> Iterator[WebhookProcess]:
    with WebhookProcess(tmp_path) as process:
        yield process


def chart_limit_bytes() -> int:
    (container,) = of_kind(render(), "Deployment")["spec"]["template"]["spec"]["containers"]
    text: str = container["resources"]["limits"]["memory"]
    return int(text.removesuffix("Mi")) * _MIB


def descriptors(webhook: WebhookProcess) -> int:
    return len(list(Path(f"/proc/{webhook.process.pid}/fd").iterdir()))


def peak_bytes(webhook: WebhookProcess) -> int:
    status = Path(f"/proc/{webhook.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def head(size: int, *more: str) -> bytes:
    lines = [
        "POST /mutate HTTP/1.1",
        "Host: webhook",
        "Content-Type: application/json",
        f"Content-Length: {size}",
        *more,
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def review_with(field: str, value: str) -> bytes:
    """A whole review, with raw JSON in its request."""
    review = json.dumps(review_of(training_pod()))
    return whole(review.replace('"request": {', f'"request": {{"{field}": {value}, ', 1))


def review_with_id(length: int) -> bytes:
    """A whole review, whose answer repeats its id."""
    return whole(json.dumps(review_of(training_pod(), uid="u" * length)))


def whole(body: str) -> bytes:
    return head(len(body)) + body.encode()


_RARE = f"{'x' * 8000}\N{MUSICAL SYMBOL G CLEF}".encode()
UNFINISHED = head(MOST_BODY_BYTES) + b'{"request": "' + b"x" * (MOST_BODY_BYTES - 100)
ATTACKS: dict[str, tuple[int, bytes, bool]] = {
    "large bodies that never end": (60, UNFINISHED, True),
    "small bodies that never end": (_MANY, head(SMALL_BODY_BYTES) + b" " * (SMALL_BODY_BYTES - 1), True),
    "headers that never end": (_MANY, b"POST /mutate HTTP/1.1\r\nX: " + b"x" * 4000, True),
    "many headers, each with a rare character, that never end": (
        _MANY,
        b"POST /mutate HTTP/1.1\r\n" + b"".join(b"X-%d: %b\r\n" % (number, _RARE) for number in range(120)),
        True,
    ),
    "nothing at all": (_MANY, b"", True),
    "no handshake": (_MANY, b"", False),
    "a review that opens a million lists": (8, review_with("x", f"[{'[],' * 900_000}[]]"), True),
    "long answers that nobody reads": (100, review_with_id(500_000), True),
    "small bodies that unpack to large ones": (
        60,
        head(len(gzip.compress(b" " * 2_900_000)), "Content-Encoding: gzip") + gzip.compress(b" " * 2_900_000)[:-1],
        True,
    ),
}


_QUICK = ("large bodies that never end", "nothing at all")


@pytest.mark.parametrize(
    "attack", [pytest.param(one, marks=() if one in _QUICK else pytest.mark.slow) for one in ATTACKS]
)
async def test_honest_reviews_are_answered_and_memory_stays_below_the_charts_limit(
    webhook: WebhookProcess, attack: str
) -> None:
    attackers, payload, handshakes = ATTACKS[attack]
    # An API server keeps its connection, or takes a new one.
    kept = webhook.connect()
    await asyncio.to_thread(ask, kept)
    async with attacking(webhook, attackers, payload, handshakes=handshakes) as sent:
        for wanted in (0, attackers):
            await until(lambda: sent() >= wanted, "all have attacked")  # noqa: B023 - awaited here
            for _ in range(_HONEST_REVIEWS):
                await asyncio.to_thread(ask, kept)
                await asyncio.to_thread(ask_over_a_new_one, webhook)
        assert descriptors(webhook) <= MOST_CONNECTIONS + MOST_PROBES + _OWN_DESCRIPTORS
    assert peak_bytes(webhook) < chart_limit_bytes()


@contextlib.asynccontextmanager
async def attacking(
    webhook: WebhookProcess, attackers: int, payload: bytes, *, handshakes: bool
) -> AsyncIterator[Callable[[], int]]:
    """So many at once, each again as soon as it is cut off. Yields how often they came through."""
    context = ssl.create_default_context(cafile=webhook.authority) if handshakes else None
    turns = [0] * attackers

    async def attack(number: int) -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", webhook.port, ssl=context)
                try:
                    writer.write(payload)
                    turns[number] = 1
                    await writer.drain()
                    # Its answer is not read; who is cut off is told by an error or an end.
                    async with asyncio.timeout(HANG_SECONDS):
                        await closed(reader)
                finally:
                    writer.transport.abort()
            await asyncio.sleep(0.1)  # or it would keep the honest one from asking

    tasks = [asyncio.create_task(attack(number)) for number in range(attackers)]
    try:
        yield lambda: sum(turns)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert not [task.exception() for task in tasks if not task.cancelled()]


async def closed(reader: asyncio.StreamReader) -> None:
    while not reader.at_eof():
        if reader.exception() is not None:
            return
        await asyncio.sleep(0.1)


def ask(connection: http.client.HTTPSConnection) -> None:
    """One honest review."""
    body = json.dumps(review_of(training_pod()))
    connection.request("POST", "/mutate", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status == 200, content
    assert json.loads(content)["response"]["allowed"]


def ask_over_a_new_one(webhook: WebhookProcess) -> None:
    connection = webhook.connect()
    ask(connection)
    connection.close()


async def until(holds: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(wait_until, holds, HANG_SECONDS, what)


_ROUNDS = 10
_SLOW_CLIENTS = 120
_READ_SECONDS = 1
_REFUSED_AT_ITS_END = b"[" + b" " * (MOST_BODY_BYTES - 1)


@pytest.mark.parametrize(
    ("payload", "status"),
    [
        pytest.param(UNFINISHED, b"408", id="bodies that never end"),
        pytest.param(head(MOST_BODY_BYTES) + _REFUSED_AT_ITS_END, b"400", id="bodies that are no JSON"),
        pytest.param(review_with_id(2_900_000), b"500", id="reviews whose answer is too long"),
    ],
)
async def test_memory_stays_below_the_limit_in_ten_rounds_of_refused_reviews(
    tmp_path: Path, payload: bytes, status: bytes
) -> None:
    with WebhookProcess(tmp_path, f"--read-seconds={_READ_SECONDS}") as webhook:
        context = ssl.create_default_context(cafile=webhook.authority)

        async def first_line(stack: contextlib.ExitStack) -> bytes:
            # A connection whose room another one needs is closed without an answer.
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", webhook.port, ssl=context)
                # Not before all are answered: a connection that waits for its next request is to hold nothing.
                stack.callback(writer.close)
                writer.write(payload)
                return await reader.readline()
            return b""

        statuses: set[bytes] = set()
        for _ in range(_ROUNDS):
            with contextlib.ExitStack() as stack:
                lines = await asyncio.wait_for(
                    asyncio.gather(*(first_line(stack) for _ in range(_SLOW_CLIENTS))), HANG_SECONDS
                )
            statuses |= {line[9:12] for line in lines}
        assert status in statuses
        await asyncio.to_thread(ask_over_a_new_one, webhook)
        assert peak_bytes(webhook) < chart_limit_bytes()


async def test_beyond_the_budget_of_large_reviews_one_is_told_so_at_once(tmp_path: Path) -> None:
    # Nobody is cut off, so that the budget stays taken.
    with WebhookProcess(tmp_path, "--read-seconds=3600") as webhook:
        context = ssl.create_default_context(cafile=webhook.authority)
        callers = [await asyncio.open_connection("127.0.0.1", webhook.port, ssl=context) for _ in range(22)]
        for _, writer in callers:
            writer.write(head(MOST_BODY_BYTES))
        answers = [asyncio.create_task(reader.readline()) for reader, _ in callers]
        # Who is one too many is whoever comes last.
        told, waiting = await asyncio.wait(answers, timeout=HANG_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for answer in waiting:
            answer.cancel()
        for _, writer in callers:
            writer.transport.abort()
    assert [b" 503 " in answer.result() for answer in told] == [True], "before a byte of its body was sent"


async def test_a_review_that_does_not_say_its_length_is_refused_before_it_comes(webhook: WebhookProcess) -> None:
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", webhook.port, ssl=ssl.create_default_context(cafile=webhook.authority)
    )
    writer.write(
        b"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    assert b" 411 " in await asyncio.wait_for(reader.readline(), HANG_SECONDS)
    writer.transport.abort()
