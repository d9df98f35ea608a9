"""The routes of the console: pages, their JSON, signing in, static files, and what probes ask."""

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import urlencode

import msgspec
from aiohttp import web

from keepstep_agent.console.access import SIGNED_IN, USER, Access, TooManyTokensError, add_headers
from keepstep_agent.console.listing import RunPage, RunQuery, page_of
from keepstep_agent.console.pages import MOST_SHOWN, render
from keepstep_agent.console.refresh import KnownRun, Runs
from keepstep_agent.console.settings import MOST_FORM_BYTES, ConsoleSettings
from keepstep_agent.console.static_files import STATIC_FILES, static_file
from keepstep_agent.console.timeline import timeline_of
from keepstep_agent.core.policies.run_overview import RunDetails, RunStanding

_OPEN: Final = frozenset({"/sign-in", "/healthz", "/readyz", *(f"/static/{name}" for name in STATIC_FILES)})
"""What shows nothing of any run."""
_NO_DETAILS: Final = RunDetails(starts=(), more_starts=0, checkpoints=(), more_checkpoints=0, units={})
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def console_pages(
    runs: Runs, settings: ConsoleSettings, access: Access, *, clock: Callable[[], float] = time.time
) -> web.Application:
    """Make the application. It only reads what is in memory."""
    pages = _Pages(runs, settings, access, clock)
    application = web.Application(middlewares=[pages.guard], client_max_size=MOST_FORM_BYTES)
    application.on_response_prepare.append(add_headers)
    application.add_routes(
        [
            web.get("/", pages.runs),
            web.get("/run", pages.run),
            web.get("/api/runs", pages.runs_json),
            web.get("/api/run", pages.run_json),
            web.get("/sign-in", pages.sign_in_form),
            web.post("/sign-in", pages.sign_in),
            web.post("/sign-out", pages.sign_out),
            web.get("/healthz", pages.healthy),
            web.get("/readyz", pages.ready),
            *(web.get(f"/static/{name}", _static(name)) for name in STATIC_FILES),
        ]
    )
    return application


def _static(name: str) -> _Handler:
    async def send(_: web.Request) -> web.Response:
        return static_file(name)

    return send


class _Pages:
    def __init__(self, runs: Runs, settings: ConsoleSettings, access: Access, clock: Callable[[], float]) -> None:
        self._runs = runs
        self._settings = settings
        self._clock = clock
        self._access = access

    @web.middleware
    async def guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Let in who may see the pages, and turn errors into pages."""
        request[USER], request[SIGNED_IN] = "", False
        try:
            user = self._access.user_of(request)
            request[USER], request[SIGNED_IN] = user or "", user is not None
            if user is None and request.path not in _OPEN:
                return self._refusal(request)
            return await handler(request)
        except TooManyTokensError as error:
            return self._too_many_tokens(request, error.wait_seconds)
        except web.HTTPRedirection:
            raise
        except web.HTTPException as error:
            text = error.text if error.text and error.status == web.HTTPRequestEntityTooLarge.status_code else ""
            return self._message(request, error.status, error.reason, text or "There is no such page.")

    async def runs(self, request: web.Request) -> web.Response:
        query = RunQuery.of(request.query)
        page = self._page(query)
        return self._html(request, "runs", query=query, page=page, refresh_seconds=self._settings.refresh_seconds)

    async def run(self, request: web.Request) -> web.Response:
        run = self._run(request)
        if run is None:
            text = "This run is not at the destination, or not any more."
            if self._runs.found_at is None:
                text = "The console is still looking for runs: load this page again in a moment."
            return self._message(request, 404, "No such run", text)
        details = run.details() or _NO_DETAILS
        standing = self._standing(run) if run.overview else None
        running_at = self._clock() if standing is RunStanding.RUNNING else None
        return self._html(
            request,
            "run",
            run=run,
            one=run.overview,
            standing=standing,
            details=details,
            line=timeline_of(details, running_at=running_at),
            most_shown=MOST_SHOWN,
            refresh_seconds=self._settings.refresh_seconds,
        )

    async def runs_json(self, request: web.Request) -> web.Response:
        page = self._page(RunQuery.of(request.query))
        return _json(
            {
                "destination": self._settings.destination,
                "found_at": self._runs.found_at,
                "complete": self._runs.complete,
                "error": self._runs.error,
                "found": page.found,
                "page": page.page,
                "pages": page.pages,
                "states": page.counts,
                "runs": [self._as_json(row.run) for row in page.rows],
            }
        )

    async def run_json(self, request: web.Request) -> web.Response:
        run = self._run(request)
        if run is None:
            return _json({"error": "no such run"}, status=404)
        return _json({**self._as_json(run), "details": run.details()})

    async def sign_in_form(self, request: web.Request) -> web.Response:
        following = _local(request.query.get("next", "/"))
        if request[SIGNED_IN]:
            return web.Response(status=303, headers={"Location": following})
        return self._sign_in_page(request, following)

    async def sign_in(self, request: web.Request) -> web.Response:
        form = await request.post()
        following = _local(str(form.get("next", "/")))
        if not self._access.is_token(str(form.get("token", "")), request):
            return self._sign_in_page(request, following, wrong=True)
        answer = web.Response(status=303, headers={"Location": following})
        self._access.sign_in(request, answer)
        return answer

    async def sign_out(self, request: web.Request) -> web.Response:
        answer = web.Response(status=303, headers={"Location": "/sign-in"})
        self._access.sign_out(answer)
        return answer

    async def healthy(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(self, _: web.Request) -> web.Response:
        """Answer a probe: the destination was looked at once, so the pages have something to show."""
        if self._runs.found_at is None:
            return web.Response(status=503, text="looking for runs\n")
        return web.Response(text="ok\n")

    def _page(self, query: RunQuery) -> RunPage:
        after = self._settings.abandoned_after_seconds
        return page_of(self._runs.known.values(), query, now=self._clock(), abandoned_after_seconds=after)

    def _run(self, request: web.Request) -> KnownRun | None:
        return self._runs.known.get(request.query.get("name", ""))

    def _standing(self, run: KnownRun) -> RunStanding:
        assert run.overview is not None, "it was read"
        return run.overview.standing(self._clock(), self._settings.abandoned_after_seconds)

    def _as_json(self, run: KnownRun) -> dict[str, Any]:
        return {
            "run": run.name,
            "state": self._standing(run) if run.overview else None,
            "read_at": run.read_at,
            "error": run.error,
            "overview": run.overview,
        }

    def _refusal(self, request: web.Request) -> web.Response:
        if request.path.startswith("/api/"):
            return _json({"error": "sign in first"}, status=401)
        if not self._settings.token and not self._settings.user_header:
            text = "This console shows its pages on this machine only. Open it as http://127.0.0.1 and its port."
            return self._message(request, 403, "Not by this name", text, linked=False)
        if not self._access.has_token:
            return self._sign_in_page(request, "/", status=401)
        following = f"/sign-in?{urlencode({'next': _local(request.path_qs)})}"
        return web.Response(status=303, headers={"Location": following})

    def _too_many_tokens(self, request: web.Request, wait_seconds: int) -> web.Response:
        if request.path.startswith("/api/"):
            refusal = _json({"error": "too many wrong tokens"}, status=429)
        else:
            text = f"Too many wrong tokens were given. Try again in {wait_seconds} seconds."
            refusal = self._message(request, 429, "Wait a moment", text)
        refusal.headers["Retry-After"] = str(wait_seconds)
        return refusal

    def _sign_in_page(
        self, request: web.Request, following: str, *, wrong: bool = False, status: int = 200
    ) -> web.Response:
        return self._html(
            request,
            "sign_in",
            status=403 if wrong else status,
            next=following,
            wrong=wrong,
            has_token=self._access.has_token,
        )

    def _message(
        self, request: web.Request, status: int, title: str, text: str, *, linked: bool = True
    ) -> web.Response:
        return self._html(request, "message", status=status, title=title, text=text, linked=linked)

    def _html(self, request: web.Request, template: str, *, status: int = 200, **values: Any) -> web.Response:
        page = render(
            template,
            now=self._clock(),
            runs=self._runs,
            destination=self._settings.destination if request[SIGNED_IN] else "",
            user=request[USER],
            can_sign_out=request[SIGNED_IN] and self._access.has_token,
            **values,
        )
        return web.Response(text=page, status=status, content_type="text/html", charset="utf-8")


def _local(address: str) -> str:
    """Return an address of the console itself; another one becomes that of all runs."""
    is_ours = address.isprintable() and address.isascii() and "\\" not in address
    return address if is_ours and (address == "/" or address.startswith(("/?", "/run?"))) else "/"


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
