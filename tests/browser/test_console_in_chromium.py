"""The console's pages in a real browser: by keys, for eyes of every kind, while runs go on, and obeying nobody."""

import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from selenium.webdriver.common.keys import Keys
from tests.browser.chromium import DESK, NARROWEST, PHONE, Browser
from tests.browser.conftest import HOSTILE, Shown
from tests.harness.bounds import HANG_SECONDS
from tests.servers.process import Daemon, wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(900)]

ROWS = "tbody th a"
TEAMS = [f"teams/{name}" for name in ("abandoned", "complete", "interrupted", "running", "stopped", "unreadable")]
TRAINING = Path(__file__).parents[2] / "examples" / "fleet" / "train.py"
TOKEN = "a token of the tests, long enough"

Show = Callable[..., Shown]


def focus_ring(browser: Browser) -> bool:
    """Whether one sees what has the focus."""
    return bool(
        browser.run(
            "const style = getComputedStyle(document.activeElement);"
            "return style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 1;"
        )
    )


def wait_for_rows(browser: Browser, names: list[str]) -> None:
    wait_until(lambda: browser.texts(ROWS) == names, f"{names} are shown")


def test_everything_is_reached_and_used_by_keys_alone(shown: Show) -> None:
    page = shown()
    browser = page.browser
    page.open()
    browser.press(Keys.TAB)
    assert browser.focused() == "Skip to the content"
    browser.press(Keys.ENTER)
    assert browser.run("return document.activeElement.id") == "main"
    reached, rows = [], []
    for _ in range(60):
        browser.press(Keys.TAB)
        if browser.focused() == "Skip to the content" or browser.run("return document.activeElement === document.body"):
            break
        reached.append(browser.focused())
        if browser.run("return document.activeElement.matches(arguments[0])", ROWS):
            rows.append(browser.focused())
        assert focus_ring(browser), f"{reached[-1]} has the focus, and nobody sees it"
    assert reached[:3] == ["q", "state", "Show"]
    assert "Goodput" in reached
    assert [name for name in rows if name in TEAMS] == TEAMS

    browser.run("document.querySelector('input[type=search]').focus()")
    browser.press("interr", Keys.ENTER)
    wait_for_rows(browser, ["teams/interrupted"])
    while browser.focused() != "teams/interrupted":
        browser.press(Keys.TAB)
    browser.press(Keys.ENTER)
    wait_until(lambda: browser.texts("h1") == ["teams/interrupted"], "the run's page is there")
    assert "200" in browser.texts("tbody th")
    assert browser.complaints() == []


def test_what_is_searched_and_sorted_has_an_address_of_its_own(shown: Show) -> None:
    page = shown()
    browser = page.browser
    page.open()
    browser.run("document.querySelector('input[type=search]').focus()")
    browser.press("teams/")
    wait_for_rows(browser, TEAMS)
    for _ in range(2):
        browser.run("[...document.querySelectorAll('th a')].find(one => one.innerText.startsWith('Step')).click()")
        wait_until(lambda: browser.texts("th[aria-sort]") != [], "the table is sorted")
    found = browser.texts(ROWS)
    assert sorted(found) == TEAMS
    assert found != TEAMS
    address = browser.driver.current_url
    assert parse_qs(urlsplit(address).query)["q"] == ["teams/"]
    browser.driver.switch_to.new_window("tab")
    browser.open(address)
    assert browser.texts(ROWS) == found
    assert browser.run("return document.querySelector('input[type=search]').value") == "teams/"
    browser.driver.close()
    browser.driver.switch_to.window(browser.driver.window_handles[0])

    page.open("?state=complete")
    assert browser.texts(ROWS) == ["teams/complete"]
    page.open("?q=nothing+has+this+name")
    assert browser.texts(ROWS) == []
    page.open(f"run?name={quote('teams/running', safe='')}")
    assert browser.texts("h1") == ["teams/running"]
    assert browser.complaints() == []


def test_hostile_names_are_shown_as_text_and_obeyed_by_nothing(shown: Show) -> None:
    page = shown()
    browser = page.browser
    page.open("?q=hostile/")
    links = browser.run("return [...document.querySelectorAll('tbody th a')].map(one => one.href)")
    names = browser.texts(ROWS)
    assert len(names) == len(HOSTILE)
    plain = {f"hostile/{name}" for name in HOSTILE if name.isprintable() and len(name) < 100}
    assert plain <= set(names)
    for link in links:
        assert urlsplit(link).netloc == urlsplit(page.console.address).netloc
        browser.open(link)
        assert browser.text("h1").startswith("hostile/")
        assert (
            browser.run("return document.querySelectorAll('img, iframe, main script, [onerror], [onload]').length") == 0
        )
        assert browser.run("return window.obeyed") is None
    assert browser.complaints() == []

    # If one did get into a page as markup, the policy would stop it, and the complaint be seen here.
    browser.run("document.body.insertAdjacentHTML('beforeend', arguments[0])", HOSTILE[0])
    complaints: list[str] = []

    def has_complained() -> bool:
        complaints.extend(browser.complaints())
        return bool(complaints)

    wait_until(has_complained, "the browser complains")
    assert "Content Security Policy" in complaints[0]
    assert browser.run("return window.obeyed") is None


def test_a_page_follows_a_run_without_being_loaded_again(shown: Show, tmp_path: Path) -> None:
    page = shown()
    browser = page.browser
    program = [sys.executable, str(TRAINING), "--steps", "100000", "--save-every", "5", "--step-seconds", "0.1"]
    command = [sys.executable, "-m", "keepstep_agent", "run", "--to", f"{page.bucket.destination}/goes-on"]
    command += ["--endpoint-url", page.bucket.endpoint_url, "--volume", str(tmp_path / "volume"), "--", *program]
    training = Daemon(command, tmp_path / "run.log")
    try:
        page.open("?q=goes-on")
        browser.run("window.loaded_once = true")

        def step() -> int:
            cells = browser.texts("tbody td:nth-of-type(3)")
            return int(cells[0]) if cells and cells[0].isdecimal() else 0

        wait_until(lambda: step() > 0, "the run appears")
        browser.run("document.querySelector('tbody th a').focus()")
        first = step()
        wait_until(lambda: step() > first, "the page shows the next checkpoint")
        assert browser.focused() == "goes-on"
        assert browser.run("return window.loaded_once")
        page.console.stop()
        wait_until(lambda: "does not answer" in browser.text("#unreachable"), "the page says that nobody answers")
        assert step() > first
    finally:
        training.stop()


def test_500_runs_of_200_checkpoints_are_opened_sorted_and_searched(browser: Browser, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.console.many_runs", "500", "200", "--stay"]
    console = Daemon(command, tmp_path / "console.log")
    try:
        wait_until(lambda: "http://" in console.log.read_text(), "all runs are read", HANG_SECONDS)
        address = next(line for line in console.log.read_text().splitlines() if line.startswith("http://"))
        browser.open(address)
        assert "500 runs" in browser.text()
        names = browser.texts(ROWS)
        assert names[0] == "team/run-00000"
        browser.driver.find_element("name", "q").send_keys("00499")
        wait_for_rows(browser, ["team/run-00499"])
        browser.driver.find_element("link text", "team/run-00499").click()
        wait_until(lambda: browser.texts("h1") == ["team/run-00499"], "the run's page is there")
        assert len(browser.texts("section[aria-labelledby=checkpoints] tbody tr")) == 200
        assert browser.complaints() == []
    finally:
        console.stop()


def test_without_javascript_everything_is_there(shown: Show) -> None:
    page = shown()
    browser = page.browser
    browser.be(scripts=False)
    page.open()
    assert set(TEAMS) <= set(browser.texts(ROWS))
    browser.driver.find_element("name", "q").send_keys("interrupted", Keys.ENTER)
    wait_for_rows(browser, ["teams/interrupted"])
    browser.driver.find_element("link text", "Goodput").click()
    wait_until(lambda: browser.texts("th[aria-sort]") != [], "the table is sorted")
    assert browser.texts(ROWS) == ["teams/interrupted"]
    browser.driver.find_element("link text", "teams/interrupted").click()
    wait_until(lambda: browser.texts("h1") == ["teams/interrupted"], "the run's page is there")
    assert "just-in-time" in browser.text("main")


@pytest.mark.usefixtures("axe")
def test_pages_keep_to_wcag_and_fit_every_screen_light_and_dark(shown: Show, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    page = shown("--token-file", str(token))
    browser = page.browser
    problems = []

    def look(path: str) -> None:
        for dark in (False, True):
            for width in (NARROWEST, PHONE, DESK):
                browser.be(width, dark=dark)
                if browser.is_cut_off():
                    problems.append(f"{path}: {width} pixels are not enough")
            problems.extend(f"{path}, dark={dark}: {found}" for found in browser.violations())
        browser.be()

    browser.open(page.console.address)
    look("signing in")
    browser.press("not the token", Keys.ENTER)
    wait_until(lambda: "not the token" in browser.text("[role=alert]"), "the token is refused")
    browser.complaints()
    browser.press(TOKEN, Keys.ENTER)
    wait_until(lambda: browser.texts("h1") == ["Runs"], "the token opens the pages")
    names = ["interrupted", "running", "unreadable"]
    for path in ["", "?q=nothing+has+this+name", *(f"run?name=teams/{name}" for name in names), "nowhere"]:
        page.open(path)
        look(path)
    assert problems == []
