"""An API server over HTTP with the objects that the webhook's certificates need, in a thread of the test.

What may be done is what `allowed` says, as RBAC does; `mood` is how it answers: well, not at all, or with an error of
its own. `asked` lists what was asked of it, in order.
"""

import asyncio
import copy
import json
import ssl
import threading
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from aiohttp import web
from tests.fakes.object_shelf import ObjectShelf, RefusedError
from tests.harness.bounds import HANG_SECONDS
from tests.servers.tls import Certificate

TOKEN: Final = "a-service-accounts-token"
# Custom resources know no strategic merge.
_MERGE_PATCHES: Final = ("application/strategic-merge-patch+json", "application/merge-patch+json")
_VERBS: Final = {"GET": "get", "POST": "create", "PATCH": "patch"}


class Mood(StrEnum):
    """How it is today."""

    WELL = "well"
    DEAF = "deaf"
    """Takes the request and never answers."""
    BROKEN = "broken"
    """500, as while etcd is away."""
    MOVED = "moved"
    """Redirects to `elsewhere`."""


class Asked(NamedTuple):
    """One request, and its answer's status. `name` is empty for a creation, where RBAC cannot see it."""

    verb: str
    resource: str
    name: str
    status: int
    manager: str


class FakeApiServer:
    """While the context is open it serves at `url`; over TLS, as pods see it, with a `certificate`."""

    def __init__(self, *, namespace: str = "keepstep", certificate: Certificate | None = None) -> None:
        self.shelf = ObjectShelf()
        self.asked: list[Asked] = []
        self.mood = Mood.WELL
        self.elsewhere = ""
        self.versions: tuple[str, ...] = ("v1", "v1beta1")
        self.allowed: Callable[[str, str, str], bool] = lambda _verb, _resource, _name: True
        self.url = ""
        self._namespace = namespace
        self._certificate = certificate
        self._ends = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._runner: web.AppRunner | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(HANG_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(HANG_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(HANG_SECONDS)
        self._loop.close()

    def service_account(self, directory: Path) -> Path:
        """As kubelet mounts it into a pod."""
        assert self._certificate is not None
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "token").write_text(TOKEN)
        (directory / "namespace").write_text(self._namespace)
        (directory / "ca.crt").write_bytes(self._certificate.certificate.read_bytes())
        return directory

    async def _serve(self) -> None:
        application = web.Application()
        namespaced = f"/{{version:v1[a-z0-9]*}}/namespaces/{self._namespace}/{{resource}}"
        for prefix in (f"/api{namespaced}", f"/apis/{{group}}{namespaced}", "/apis/{group}/{version:v1}/{resource}"):
            application.add_routes(
                [web.route("*", prefix, self._answer), web.route("*", prefix + "/{name}", self._answer)]
            )
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        context = None
        if self._certificate is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(self._certificate.certificate, self._certificate.key)
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"{'http' if context is None else 'https'}://{host}:{port}"

    async def _end(self) -> None:
        assert self._runner is not None
        self._ends.set()
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        resource, name = request.match_info["resource"], request.match_info.get("name", "")
        verb = "list" if request.method == "GET" and not name else _VERBS.get(request.method, request.method)
        body = await request.json() if request.can_read_body else None
        match self.mood:
            case Mood.DEAF:
                await self._ends.wait()
            case Mood.BROKEN:
                return _status(500, "InternalError", "etcdserver: leader changed")
            case Mood.MOVED:
                return web.Response(status=307, headers={"Location": self.elsewhere})
            case Mood.WELL:
                pass
        try:
            answer = web.json_response(self._done(request, verb, resource, name, body))
        except RefusedError as error:
            answer = _status(error.status, error.reason, str(error))
        manager = request.query.get("fieldManager", "")
        self.asked.append(Asked(verb, resource, name, answer.status, manager))
        return answer

    def _done(self, request: web.Request, verb: str, resource: str, name: str, body: Any) -> dict[str, Any]:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise RefusedError(401, "Unauthorized", "Unauthorized")
        if not self.allowed(verb, resource, name):
            message = f'{resource} "{name}" is forbidden: User "keepstep" cannot {verb} resource "{resource}"'
            raise RefusedError(403, "Forbidden", message)
        match verb:
            case "get" if name:
                return self.shelf.get(resource, name)
            case "list" if request.match_info["version"] in self.versions:
                label, field = (request.query.get(f"{kind}Selector", "") for kind in ("label", "field"))
                return {"items": self.shelf.selected(resource, label=label, field=field)}
            case "list":
                raise RefusedError(404, "NotFound", "the server could not find the requested resource")
            case "create" if not name:
                return self.shelf.create(resource, body)
            case "patch" if request.content_type == _MERGE_PATCHES[resource == "workloads"]:
                is_dry = request.query.get("dryRun") == "All"
                return (copy.deepcopy(self.shelf) if is_dry else self.shelf).patch(resource, name, body)
            case _:
                raise RefusedError(415, "UnsupportedMediaType", f"{verb} {request.content_type}")


def _status(code: int, reason: str, message: str) -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "message": message,
        "code": code,
    }
    return web.Response(status=code, text=json.dumps(body), content_type="application/json")
