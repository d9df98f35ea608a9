"""What the pages show of stored runs, that opening them costs no request, and that nothing in a name is obeyed."""

import json
import re
from html.parser import HTMLParser
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.console.conftest import NOW, Opener
from tests.console.stored_runs import interrupted_run, long_run, run_objects
from tests.core.noted_lives import NotedLife

from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.model import Kind
from keepstep_agent.core.stored.ledger import SaveLost

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'-alert(1)-'",
    "{{ 7 * 7 }}{% raw %}",
    "..",
    "%2e%2e%2f",
    "a&name=b",
    "\u202egnp.exe",
    "line\nbreak\x00\x1b[31m",
    "é" * 400,
    "a/b c+d#e?f",
]


class _Document(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("td", "th", "dd", "p", "li"):
            self.text += " "

    def handle_data(self, data: str) -> None:
        self.text += data

    @property
    def words(self) -> str:
        return " ".join(self.text.split())

    def links(self, path: str) -> list[str]:
        found = [attributes.get("href") or "" for tag, attributes in self.tags if tag == "a"]
        return [link for link in found if urlsplit(link).path == path]


async def test_the_first_page_shows_each_run_and_what_a_crash_now_would_cost(console: Opener) -> None:
    opened = await console()
    opened.put("team/one/", interrupted_run())
    opened.put("two/", long_run(10, began_at=NOW - 6060))
    opened.put("three/", run_objects(steps={100: NOW - 60.0}, kinds={100: Kind.FINAL}))
    await opened.runs.read_all()
    _, page, _ = await opened.get("/")
    rows = re.findall(r"<tr>\n<th scope=\"row\">.*?</tr>", page, re.DOTALL)
    assert [_Document(row).words for row in rows] == [
        "team/one stopped 2.2 h ago 720 72.6% 5 min 9 min 1020 B 2.2 h ago",
        "three complete 1 min ago 100 no ledger no ledger no ledger 1000 B 1 min ago",
        "two running 1 min ago 1000 99.3% 45.0 s nothing 1.1 KiB 40.0 s ago",
    ]
    assert "3 runs" in _Document(page).words


async def test_the_first_page_sums_up_what_was_found(console: Opener) -> None:
    opened = await console()
    opened.put("one/", interrupted_run())
    opened.put("two/", interrupted_run())
    opened.put("fresh/", long_run(10, began_at=NOW - 6060))
    opened.put("old/", long_run(3, began_at=NOW - 2500))
    await opened.runs.read_all()
    _, page, _ = await opened.get("/?q=o")
    words = _Document(page).words
    assert "A crash now would cost at most 12 min (old)" in words
    assert "Kept just in time 17 min" in words
    assert "most of it by drain: uploading after training had ended" in words
    _, page, _ = await opened.get("/?q=fresh")
    assert "Goodput of all together 99.3%" in _Document(page).words
    _, page, _ = await opened.get("/?q=one")
    assert "nothing: no run with a recovery point is running" in _Document(page).words


async def test_a_runs_page_has_its_facts_losses_starts_and_checkpoints(console: Opener) -> None:
    opened = await console()
    opened.put("one/", interrupted_run())
    await opened.runs.read_all()
    _, page, _ = await opened.get("/run?name=one")
    words = _Document(page).words
    for told in (
        "Recovery point step 720, taken 2.2 h ago (just-in-time)",
        "Goodput 72.6%: 12 min of 17 min were work that lasts",
        "Steps done again 60, 1 s each",
        "Kept just in time 520 steps, 9 min of work",
        "Stored 3 committed checkpoints, 1020 B",
        "redone 1 min 6.0% work after the checkpoint that the next start resumed from",
        "1970-01-01 00:22:20 UTC job 1 step 200 11 min 1970-01-01 00:31:40 UTC, spot ended 1970-01-01 00:33:20 UTC",
        "720 just-in-time committed 2.2 h ago 1000 B 4.0 s 1970-01-01 00:31:46 UTC save-720",
    ):
        assert told in words
    assert page.count("<rect") > 10


async def test_a_destination_that_is_a_run_itself_has_its_page(console: Opener) -> None:
    opened = await console()
    opened.put("", interrupted_run())
    await opened.runs.read_all()
    _, page, _ = await opened.get("/")
    (link,) = _Document(page).links("/run")
    status, page, _ = await opened.get(link)
    assert (status, "step 720" in page) == (200, True)


async def test_every_checkpoint_says_what_became_of_it(console: Opener) -> None:
    opened = await console()
    life = NotedLife("agent-1")
    life.start(NOW - 900)
    life.ranks(NOW - 890, 1)
    for step in (100, 200, 300, 400, 500):
        life.save(NOW - 900 + step, NOW - 899 + step, step)
    life.commit(NOW - 700, 100)
    life.commit(NOW - 600, 200)
    life.add(SaveLost, NOW - 500, save="save-300", outcome="shed", reason="superseded by step 400")
    life.add(SaveLost, NOW - 450, save="save-400", outcome="failed", reason="the volume is gone")
    opened.put("one/", run_objects([life.life], steps={200: NOW - 600}))
    await opened.runs.read_all()
    _, body, _ = await opened.get("/api/run?name=one")
    rows = json.loads(body)["details"]["checkpoints"]
    assert [(row["step"], row["state"], row["reason"]) for row in rows] == [
        (500, "in progress", ""),
        (400, "failed", "the volume is gone"),
        (300, "shed", "superseded by step 400"),
        (200, "committed", ""),
        (100, "pruned", ""),
    ]
    _, page, _ = await opened.get("/run?name=one")
    assert "shed: superseded by step 400" in _Document(page).words


async def test_a_run_of_several_trainings_shows_the_directory_of_each(console: Opener) -> None:
    opened = await console()
    opened.put("plain/", run_objects(steps={10: NOW - 100}))
    opened.put(
        "stages/",
        run_objects(
            steps={900: NOW - 300, 20: NOW - 60}, kinds={900: Kind.FINAL}, directories={900: "out/one", 20: "out/two"}
        ),
    )
    await opened.runs.read_all()
    _, page, _ = await opened.get("/run?name=stages")
    words = _Document(page).words
    assert "Recovery point step 20" in words
    assert "20 out/two periodic committed" in words
    _, page, _ = await opened.get("/run?name=plain")
    assert "Directory" not in page


@pytest.mark.parametrize("name", HOSTILE)
async def test_no_name_from_the_bucket_is_obeyed_and_its_link_leads_to_its_page(console: Opener, name: str) -> None:
    opened = await console()
    life = NotedLife("agent-1", attempt=name[:100])
    life.start(NOW - 900)
    life.save(NOW - 800, NOW - 790, 10**12 - 1, kind=name[:100], units={name[:100]: 1e300})
    life.notice(NOW - 700)
    opened.put(f"{name}/", run_objects([life.life], steps={10**12 - 1: NOW - 700}))
    # An attempt is a folder of the bucket too, so such a one is nobody's.
    keys = [key for key in opened.store.objects if "ledger" in key]
    for key in keys:
        opened.store.objects[f"{name}/.keepstep/ledger/job/0000000009300-a.json"] = opened.store.objects.pop(key)
    opened.put("other/", interrupted_run())
    await opened.runs.read_all()
    _, page, _ = await opened.get("/")
    links = [link for link in _Document(page).links("/run") if parse_qs(urlsplit(link).query) == {"name": [name]}]
    assert links
    status, own, _ = await opened.get(links[0])
    assert status == 200
    assert "999999999999" in own
    for text in (page, own):
        document = _Document(text)
        kinds = {tag for tag, _ in document.tags}
        assert not kinds & {"img", "iframe", "object", "embed", "base", "style"}
        assert [attributes for tag, attributes in document.tags if tag == "script"] == [
            {"src": "/static/console.js", "defer": None}
        ]
        assert not [
            key for _, attributes in document.tags for key in attributes if key.startswith("on") or key == "style"
        ]
        assert not set("\u202e\x00\x1b") & set(text)
        assert "49" not in re.findall(r"<bdi>(.*?)</bdi>", text)
    assert name[:60].isprintable() <= (name[:60] in _Document(own).text)


@pytest.mark.parametrize("at", [-1e18, 0.0, 253_402_300_800.0, 1e18])
async def test_a_time_that_no_calendar_has_breaks_no_page(console: Opener, at: float) -> None:
    opened = await console()
    opened.put("one/", run_objects(steps={100: 1000.0}))
    opened.put("two/", interrupted_run())
    for one in opened.store.objects.values():
        one.modified_at = at
    await opened.runs.read_all()
    for address in ("/", "/?sort=recovery", "/run?name=one", "/run?name=two", "/api/runs"):
        status, _, _ = await opened.get(address)
        assert status == 200


async def test_a_search_a_state_and_an_order_are_in_the_address(console: Opener) -> None:
    opened = await console()
    opened.put("team/one/", interrupted_run())
    opened.put("team/two/", long_run(10, began_at=NOW - 6060))
    opened.put("other/", long_run(3, began_at=NOW - 1860))
    await opened.runs.read_all()

    async def names(address: str) -> list[str]:
        _, page, _ = await opened.get(address)
        links = re.findall(r'<th scope="row"><a href="/run([^"]+)"', page)
        return [parse_qs(link.removeprefix("?"))["name"][0] for link in links]

    assert await names("/") == ["other", "team/one", "team/two"]
    assert await names("/?q=TEAM") == ["team/one", "team/two"]
    assert await names("/?q=team&state=running") == ["team/two"]
    assert await names("/?sort=step&order=falling") == ["team/two", "team/one", "other"]
    assert await names("/?sort=step&order=rising") == ["other", "team/one", "team/two"]
    assert await names("/?q=nothing") == []
    _, page, _ = await opened.get("/?q=team&sort=step")
    assert "/?q=team&sort=step&order=rising" in _Document(page).links("/")
    for nonsense in ("/?page=0", "/?page=-1", "/?page=9999999999999", "/?sort=__class__&order=up&state=x&page=%00"):
        assert len(await names(nonsense)) == 3


async def test_many_runs_are_shown_in_pages(console: Opener) -> None:
    opened = await console()
    for number in range(250):
        opened.put(f"run-{number:03}/", run_objects(steps={100: NOW - 60.0}))
    await opened.runs.read_all()
    seen: list[str] = []
    for number in (1, 2, 3):
        _, page, _ = await opened.get(f"/?page={number}")
        seen += _Document(page).links("/run")
    assert len(seen) == len(set(seen)) == 250
    assert (await opened.get("/?page=99"))[1] == page


async def test_a_page_costs_no_request(console: Opener) -> None:
    opened = await console()
    opened.put("one/", interrupted_run())
    await opened.runs.read_all()
    opened.store.calls.clear()
    for address in ("/", "/run?name=one", "/api/runs", "/api/run?name=one", "/run?name=two", "/static/console.js"):
        await opened.get(address)
    assert opened.store.calls == []


async def test_what_cannot_be_read_is_said_at_its_run_and_its_figures_stay(console: Opener) -> None:
    opened = await console()
    opened.put("one/", interrupted_run())
    opened.put("two/", interrupted_run())
    await opened.runs.read_all()
    opened.runs._round = 0  # every run's turn
    opened.store.fail("list", ErrorKind.ACCESS_DENIED)
    await opened.runs.read_all()
    _, page, _ = await opened.get("/")
    assert _Document(page).words.count("cannot be read; figures of now") == 1
    assert page.count('<td class="number">72.6%</td>') == 2
    broken = next(name for name, run in opened.runs.known.items() if run.error)
    _, page, _ = await opened.get(f"/run?name={broken}")
    assert "This run cannot be read: list fails because a test wants it" in _Document(page).words
    assert "72.6%" in page


async def test_an_unreachable_store_is_said_and_the_last_known_figures_stay(console: Opener) -> None:
    opened = await console()
    opened.store.fail("list_folders", ErrorKind.UNREACHABLE)
    await opened.runs.read_all()
    assert "The store does not answer" in (await opened.get("/"))[1]
    assert (await opened.get("/readyz"))[0] == 503
    opened.put("one/", interrupted_run())
    await opened.runs.read_all()
    assert "The store does not answer" not in (await opened.get("/"))[1]
    assert (await opened.get("/readyz"))[0] == 200
    opened.store.fail("list_folders", ErrorKind.UNREACHABLE)
    await opened.runs.read_all()
    _, page, _ = await opened.get("/run?name=one")
    assert "The store does not answer" in page
    assert "72.6%" in page


@pytest.mark.parametrize("address", ["/run", "/run?name=no", "/../etc/passwd", "/static/../pages.py", "/static/x"])
async def test_what_is_not_there_is_a_page_that_says_so(console: Opener, address: str) -> None:
    opened = await console()
    await opened.runs.read_all()
    status, page, headers = await opened.get(address)
    assert (status, headers["Content-Type"]) == (404, "text/html; charset=utf-8")
    assert "Content-Security-Policy" in headers
    assert "All runs" in page


async def test_every_answer_has_the_headers_that_allow_only_our_own_files(console: Opener) -> None:
    opened = await console()
    await opened.runs.read_all()
    for method, address in (("GET", "/"), ("GET", "/static/console.css"), ("POST", "/"), ("GET", "/healthz")):
        _, _, headers = await opened.ask(method, address)
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'")
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
