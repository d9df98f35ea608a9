"""Who is let in: by a token, by a proxy's header, and without either by this machine's names alone."""

import ipaddress
from http.cookies import SimpleCookie
from urllib.parse import quote_from_bytes

import pytest
from tests.console.conftest import NOW, Opener

from keepstep_agent.console.access import TooManyTokensError, WrongTokens

TOKEN = "0123456789abcdef-token"
PROXY = (ipaddress.ip_network("127.0.0.0/8"),)
ELSEWHERE = (ipaddress.ip_network("10.0.0.0/8"),)


@pytest.mark.parametrize("address", ["/", "/run?name=a", "/api/runs", "/api/run?name=a", "/nowhere"])
async def test_without_the_token_nothing_is_shown(console: Opener, address: str) -> None:
    opened = await console(token=TOKEN)
    await opened.runs.read_all()
    status, page, _ = await opened.get(address)
    assert status in (303, 401)
    assert "s3://bucket" not in page


async def test_a_token_in_the_form_gives_a_cookie_that_is_not_the_token(console: Opener) -> None:
    opened = await console(token=TOKEN)
    await opened.runs.read_all()
    status, _, headers = await opened.get("/?q=a")
    assert (status, headers["Location"]) == (303, "/sign-in?next=%2F%3Fq%3Da")
    assert 'value="/?q=a"' in (await opened.get(headers["Location"]))[1]
    form = {"token": TOKEN, "next": "/?q=a"}
    status, _, headers = await opened.ask("POST", "/sign-in", data=form)
    assert (status, headers["Location"]) == (303, "/?q=a")
    cookie = SimpleCookie(headers["Set-Cookie"])["keepstep-console"]
    assert (cookie["httponly"], cookie["samesite"], cookie["secure"]) == (True, "Strict", "")
    assert TOKEN not in headers["Set-Cookie"]
    signed_in = {"Cookie": f"keepstep-console={cookie.value}"}
    status, page, _ = await opened.get("/", headers=signed_in)
    assert (status, TOKEN in page) == (200, False)
    _, _, headers = await opened.ask("POST", "/sign-in", data=form, headers={"X-Forwarded-Proto": "https"})
    assert SimpleCookie(headers["Set-Cookie"])["keepstep-console"]["secure"] is True
    _, _, headers = await opened.ask("POST", "/sign-out", headers=signed_in)
    assert SimpleCookie(headers["Set-Cookie"])["keepstep-console"].value == ""


@pytest.mark.parametrize("given", ["", "wrong", TOKEN[:-1], TOKEN + "x", "é" * 22, "\udc80"])
async def test_another_token_is_refused(console: Opener, given: str) -> None:
    opened = await console(token=TOKEN)
    form = f"token={quote_from_bytes(given.encode(errors='surrogateescape'))}"
    form_type = {"Content-Type": "application/x-www-form-urlencoded"}
    status, page, headers = await opened.ask("POST", "/sign-in", headers=form_type, data=form)
    assert (status, "Set-Cookie" in headers) == (403, False)
    assert "This is not the token" in page
    bearer = {"Authorization": f"Bearer {given}".encode(errors="surrogateescape").decode("latin-1")}
    assert (await opened.get("/api/runs", headers=bearer))[0] == 401


async def test_programs_send_the_token_in_a_header(console: Opener) -> None:
    opened = await console(token=TOKEN)
    status, body, _ = await opened.get("/api/runs", headers={"Authorization": f"Bearer {TOKEN}"})
    assert (status, '"runs":[]' in body) == (200, True)


@pytest.mark.parametrize(
    "cookie",
    [
        "",
        "x",
        ".",
        f"{int(NOW) + 100}.",
        f"{int(NOW) + 100}.{'0' * 64}",
        TOKEN,
        "9" * 4000,
        "\xb2.x",
    ],
)
async def test_a_forged_cookie_is_no_session(console: Opener, cookie: str) -> None:
    opened = await console(token=TOKEN)
    assert (await opened.get("/api/runs", headers={"Cookie": f"keepstep-console={cookie}"}))[0] == 401


async def test_a_session_ends_by_itself_and_with_its_token(console: Opener) -> None:
    first = await console(token=TOKEN)
    _, _, headers = await first.ask("POST", "/sign-in", data={"token": TOKEN})
    value = SimpleCookie(headers["Set-Cookie"])["keepstep-console"].value
    cookie = {"Cookie": f"keepstep-console={value}"}
    assert (await first.get("/api/runs", headers=cookie))[0] == 200
    assert (await (await console(token=TOKEN)).get("/api/runs", headers=cookie))[0] == 200
    assert (await (await console(token=f"{TOKEN}-2")).get("/api/runs", headers=cookie))[0] == 401
    until, _, signature = value.partition(".")
    longer = {"Cookie": f"keepstep-console={int(until) + 1}.{signature}"}
    assert (await first.get("/api/runs", headers=longer))[0] == 401


@pytest.mark.parametrize(
    "following",
    ["https://evil.example/", "//evil.example", "/\\evil.example", "javascript:alert(1)", "/sign-out", "\n/"],
)
async def test_signing_in_leads_to_no_other_site(console: Opener, following: str) -> None:
    opened = await console(token=TOKEN)
    _, _, headers = await opened.ask("POST", "/sign-in", data={"token": TOKEN, "next": following})
    assert headers["Location"] == "/"


async def test_after_ten_wrong_tokens_no_other_is_looked_at_and_sessions_go_on(console: Opener) -> None:
    opened = await console(token=TOKEN)
    _, _, headers = await opened.ask("POST", "/sign-in", data={"token": TOKEN})
    cookie = {"Cookie": f"keepstep-console={SimpleCookie(headers['Set-Cookie'])['keepstep-console'].value}"}
    wrong = {"Authorization": "Bearer wrong"}
    for _ in range(5):
        assert (await opened.ask("POST", "/sign-in", data={"token": "wrong"}))[0] == 403
        assert (await opened.get("/api/runs", headers=wrong))[0] == 401
    right = {"Authorization": f"Bearer {TOKEN}"}
    refused = [
        await opened.ask("POST", "/sign-in", data={"token": TOKEN}),
        await opened.get("/api/runs", headers=right),
        await opened.get("/", headers=wrong),
    ]
    assert [status for status, _, _ in refused] == [429] * 3
    assert all(0 < int(headers["Retry-After"]) <= 6 for _, _, headers in refused)
    assert (await opened.get("/api/runs", headers=cookie))[0] == 200
    assert (await opened.get("/api/runs", headers=cookie | wrong))[0] == 200
    assert (await opened.get("/sign-in"))[0] == 200


async def test_a_trusted_proxy_says_whose_wrong_tokens_they_are(console: Opener) -> None:
    opened = await console(token=TOKEN, user_header="X-User", trusted_proxies=PROXY)
    wrong = {"Authorization": "Bearer wrong"}
    for _ in range(11):
        # A client may have put anything before what its proxy adds.
        status, _, _ = await opened.get("/api/runs", headers=wrong | {"X-Forwarded-For": "192.0.2.2, 192.0.2.1"})
    assert status == 429
    other = {"Authorization": f"Bearer {TOKEN}", "X-Forwarded-For": "192.0.2.1, 192.0.2.2"}
    assert (await opened.get("/api/runs", headers=other))[0] == 200


async def test_what_a_trusted_proxy_says_in_a_line_of_its_own_counts(console: Opener) -> None:
    opened = await console(token=TOKEN, user_header="X-User", trusted_proxies=PROXY)
    for number in range(11):
        lines = [("Authorization", "Bearer wrong"), ("X-Forwarded-For", f"192.0.2.{number}")]
        status, _, _ = await opened.get("/api/runs", headers=[*lines, ("X-Forwarded-For", "198.51.100.1")])
    assert status == 429


async def test_nobody_else_says_whose_wrong_tokens_they_are(console: Opener) -> None:
    opened = await console(token=TOKEN)
    for number in range(11):
        headers = {"Authorization": "Bearer wrong", "X-Forwarded-For": f"192.0.2.{number}"}
        status, _, _ = await opened.get("/api/runs", headers=headers)
    assert status == 429


def test_an_allowance_of_wrong_tokens_comes_back_with_time() -> None:
    now = 0.0
    wrong = WrongTokens(lambda: now)
    for _ in range(10):
        wrong.check("a")
        wrong.add("a")
    with pytest.raises(TooManyTokensError) as refused:
        wrong.check("a")
    assert refused.value.wait_seconds == 6
    wrong.check("b")
    now = 6.0
    wrong.check("a")
    wrong.add("a")
    with pytest.raises(TooManyTokensError):
        wrong.check("a")
    now = 1000.0
    for _ in range(10):
        wrong.check("a")
        wrong.add("a")


def test_many_addresses_together_are_slowed_too_and_take_no_memory_without_end() -> None:
    now = 0.0
    wrong = WrongTokens(lambda: now)
    for number in range(100):
        wrong.check(str(number))
        wrong.add(str(number))
    with pytest.raises(TooManyTokensError):
        wrong.check("of one that gave none")
    for number in range(5000):
        wrong.add(str(number))
    assert len(wrong._whole_at) == 1000


async def test_a_proxys_header_lets_in_whom_it_names(console: Opener) -> None:
    opened = await console(user_header="X-User", trusted_proxies=PROXY)
    assert (await opened.get("/"))[0] == 401
    assert (await opened.get("/", headers={"X-User": " "}))[0] == 401
    status, page, _ = await opened.get("/", headers={"X-User": "<b>ann</b>" + "\u202e" * 200})
    assert status == 200
    assert "Signed in as <bdi>&lt;b&gt;ann&lt;/b&gt;\\" in page


async def test_the_header_of_anyone_else_counts_nothing(console: Opener) -> None:
    opened = await console(user_header="X-User", trusted_proxies=ELSEWHERE)
    status, page, _ = await opened.get("/", headers={"X-User": "ann", "X-Forwarded-For": "10.0.0.1"})
    assert (status, "s3://bucket" in page) == (401, False)


async def test_a_token_or_a_header_suffices_where_both_are_set(console: Opener) -> None:
    opened = await console(token=TOKEN, user_header="X-User", trusted_proxies=PROXY)
    assert (await opened.get("/api/runs"))[0] == 401
    assert (await opened.get("/api/runs", headers={"X-User": "ann"}))[0] == 200
    assert (await opened.get("/api/runs", headers={"Authorization": f"Bearer {TOKEN}"}))[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8400", 200),
        ("127.0.0.1", 200),
        ("[::1]:9", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
    ],
)
async def test_an_open_console_answers_to_this_machines_names_alone(console: Opener, host: str, status: int) -> None:
    opened = await console()
    found, page, _ = await opened.get("/", headers={"Host": host})
    assert (found, "s3://bucket" in page) == (status, status == 200)


async def test_what_probes_ask_needs_no_token_and_tells_nothing(console: Opener) -> None:
    opened = await console(token=TOKEN)
    assert (await opened.get("/healthz"))[:2] == (200, "ok\n")
    assert (await opened.get("/readyz"))[:2] == (503, "looking for runs\n")
    await opened.runs.read_all()
    assert (await opened.get("/readyz"))[:2] == (200, "ok\n")


async def test_a_form_that_is_too_large_is_refused(console: Opener) -> None:
    opened = await console(token=TOKEN)
    status, _, _ = await opened.ask("POST", "/sign-in", data={"token": "x" * 100_000})
    assert status == 413
