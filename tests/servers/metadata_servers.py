"""The metadata services of three clouds, each as its documentation has it, in a thread of the test on loopback.

What a cloud refuses is refused here too: a request without its header, a forwarded one, a token that has expired, an
answer that would have to go further than the hop limit. `asked` is when each path was asked for, by the loop's clock.
"""

import asyncio
import datetime
import threading
import uuid
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from typing import Any, Final, Self

from aiohttp import web
from tests.harness.bounds import HANG_SECONDS

_LONGEST_TOKEN_SECONDS: Final = 21600


class MetadataServer:
    """While the context is open it serves at `url`. `fault`: a status that everything is answered with."""

    cloud = ""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[tuple[str, float]] = []
        self.fault: int | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._runner: web.AppRunner | None = None
        self._changed = asyncio.Event()
        self._ending = False

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(HANG_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._runner is not None
        self._ending = True
        self._change(lambda: None)
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(HANG_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(HANG_SECONDS)
        self._loop.close()

    def times_asked(self, ending: str) -> list[float]:
        return [at for path, at in self.asked if path.endswith(ending)]

    def announce(self, seconds: float, now: float) -> float:
        """A spot machine's end, `seconds` from `now`; returns the deadline that is to be kept, unix seconds."""
        raise NotImplementedError

    def maintain(self, seconds: float, now: float) -> float:
        """A maintenance that ends the machine."""
        raise NotImplementedError

    def spare(self) -> None:
        """Something that does not end the machine."""
        raise NotImplementedError

    def take_back(self) -> None:
        """There is no notice any more."""
        raise NotImplementedError

    def _change(self, change: Callable[[], None]) -> None:
        """On the server's own thread, and who waits for a change hears of it."""

        async def there() -> None:
            change()
            self._changed.set()
            self._changed = asyncio.Event()

        asyncio.run_coroutine_threadsafe(there(), self._loop).result(HANG_SECONDS)

    async def _serve(self) -> None:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._take)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def _take(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, self._loop.time()))
        if self.fault is not None:
            return web.Response(status=self.fault)
        if "X-Forwarded-For" in request.headers:
            return web.Response(status=403)
        return await self._answer(request)

    def _answer(self, request: web.Request) -> Awaitable[web.Response]:
        raise NotImplementedError


class AwsServer(MetadataServer):
    """`hop_limit_reached`: answers to PUT are lost on the way. `tokens_required`: version 2 alone."""

    cloud = "aws"

    def __init__(self, *, tokens_required: bool = True, hop_limit_reached: bool = False) -> None:
        super().__init__()
        self.tokens_required = tokens_required
        self.hop_limit_reached = hop_limit_reached
        self.disabled = False
        self.spot: Any = None
        self.maintenance: list[dict[str, str]] = []
        self._tokens: set[str] = set()

    def announce(self, seconds: float, now: float) -> float:
        deadline = float(int(now + seconds))
        self.spot = {"action": "terminate", "time": _iso(deadline)}
        return deadline

    def maintain(self, seconds: float, now: float) -> float:
        deadline = float(int(now + seconds))
        self.maintenance = [_aws_event("system-reboot", deadline, "active")]
        return deadline

    def spare(self) -> None:
        self.spot = {"action": "hibernate", "time": "2030-01-01T00:00:00Z"}
        self.maintenance = [
            _aws_event("system-reboot", 0.0, "completed"),
            _aws_event("system-maintenance", 0.0, "active"),
        ]

    def take_back(self) -> None:
        self.spot, self.maintenance = None, []

    def expire_tokens(self) -> None:
        self._tokens.clear()

    async def _answer(self, request: web.Request) -> web.Response:
        if self.disabled:
            return web.Response(status=403)
        if request.path == "/latest/api/token":
            return await self._token(request)
        token = request.headers.get("X-aws-ec2-metadata-token")
        if token not in self._tokens if token is not None else self.tokens_required:
            return web.Response(status=401)
        match request.path:
            case "/latest/meta-data/":
                return web.Response(text="ami-id\nevents/\nhostname")
            case "/latest/meta-data/spot/instance-action" if self.spot is not None:
                return web.json_response(self.spot)
            case "/latest/meta-data/events/maintenance/scheduled":
                return web.json_response(self.maintenance)
            case _:
                return web.Response(status=404)

    async def _token(self, request: web.Request) -> web.Response:
        if request.method != "PUT":
            return web.Response(status=405)
        seconds = request.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if not seconds.isdecimal() or not 1 <= int(seconds) <= _LONGEST_TOKEN_SECONDS:
            return web.Response(status=400)
        if self.hop_limit_reached:
            await asyncio.sleep(HANG_SECONDS)
        token = uuid.uuid4().hex
        self._tokens.add(token)
        return web.Response(text=token, headers={"X-aws-ec2-metadata-token-ttl-seconds": seconds})


class GcpServer(MetadataServer):
    """`values`: by key; one that is not there is answered with 404, as GKE's own metadata server may."""

    cloud = "gcp"

    def __init__(self) -> None:
        super().__init__()
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}

    def announce(self, seconds: float, now: float) -> float:
        self._change(lambda: self.values.update(preempted="TRUE"))
        return now + 30

    def maintain(self, seconds: float, now: float) -> float:
        self._change(lambda: self.values.update({"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}))
        return now + 60

    def spare(self) -> None:
        self._change(lambda: self.values.update({"maintenance-event": "MIGRATE_ON_HOST_MAINTENANCE"}))

    def take_back(self) -> None:
        self._change(lambda: self.values.update({"preempted": "FALSE", "maintenance-event": "NONE"}))

    async def _answer(self, request: web.Request) -> web.Response:
        if request.headers.get("Metadata-Flavor") != "Google":
            return web.Response(status=403)
        key = request.path.removeprefix("/computeMetadata/v1/instance/")
        if key == "":
            return web.Response(text="attributes/\nid\n", headers={"Metadata-Flavor": "Google"})
        if key not in self.values:
            return web.Response(status=404, headers={"Metadata-Flavor": "Google"})
        if request.query.get("wait_for_change") == "true":
            known = request.query.get("last_etag")
            try:
                async with asyncio.timeout(float(request.query.get("timeout_sec", HANG_SECONDS))):
                    while not self._ending and known in (None, self._etag(key)):
                        await self._changed.wait()
                        known = known or "0"
            except TimeoutError:
                pass
        return web.Response(text=self.values[key], headers={"Metadata-Flavor": "Google", "ETag": self._etag(key)})

    def _etag(self, key: str) -> str:
        return f"{hash((key, self.values[key])) & 0xFFFFFFFF:x}"


class AzureServer(MetadataServer):
    """The list is the whole scale set's: what happens to `another` machine is told to all of them."""

    cloud = "azure"

    def __init__(self, name: str = "trainers_3") -> None:
        super().__init__()
        self.name = name
        self.events: list[dict[str, Any]] = []

    def announce(self, seconds: float, now: float) -> float:
        return self._schedule("Preempt", self.name, seconds, now)

    def maintain(self, seconds: float, now: float) -> float:
        return self._schedule("Redeploy", self.name, seconds, now)

    def spare(self) -> None:
        self._schedule("Freeze", self.name, 60, 0.0)
        self._schedule("Preempt", "trainers_33", 60, 0.0)

    def take_back(self) -> None:
        self.events = []

    def begin(self) -> None:
        """What was scheduled has begun: it has no time any more."""
        self.events = [{**event, "EventStatus": "Started", "NotBefore": ""} for event in self.events]

    def _schedule(self, event_type: str, machine: str, seconds: float, now: float) -> float:
        deadline = float(int(now + seconds))
        event = {
            "EventId": str(uuid.uuid4()).upper(),
            "EventStatus": "Scheduled",
            "EventType": event_type,
            "ResourceType": "VirtualMachine",
            "Resources": [machine],
            "NotBefore": _http_date(deadline),
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }
        self.events = [*self.events, event]
        return deadline

    async def _answer(self, request: web.Request) -> web.Response:
        if request.headers.get("Metadata", "").lower() != "true" or not request.query.get("api-version"):
            return web.json_response({"error": "Bad request"}, status=400)
        match request.path:
            case "/metadata/instance/compute/name" if request.query.get("format") == "text":
                return web.Response(text=self.name)
            case "/metadata/scheduledevents":
                return web.json_response({"DocumentIncarnation": len(self.events), "Events": self.events})
            case _:
                return web.json_response({"error": "Not found"}, status=404)


def _iso(at: float) -> str:

    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _http_date(at: float) -> str:

    return formatdate(at, usegmt=True)


def _aws_event(code: str, deadline: float, state: str) -> dict[str, str]:
    """Its dates have no weekday."""
    return {
        "NotBefore": _http_date(deadline).partition(", ")[2],
        "Code": code,
        "Description": "scheduled",
        "EventId": f"instance-event-{int(deadline):017x}",
        "NotAfter": _http_date(deadline + 900).partition(", ")[2],
        "State": state,
    }
