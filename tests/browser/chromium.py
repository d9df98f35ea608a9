"""A real Chromium without a window, driven as a person would: by keys, at a width, in the dark, without JavaScript."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from selenium.webdriver import ActionChains, Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from tests.harness.bounds import HANG_SECONDS

_PROGRAMS: Final = ("chromium", "chromedriver")
_SANDBOX: Final = Path("/usr/lib/chromium/chrome-sandbox")
_AXE: Final = Path(__file__).parent / "node_modules" / "axe-core" / "axe.min.js"
_RULES: Final = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa")

PHONE: Final = 360
NARROWEST: Final = 320
"""CSS pixels to which WCAG wants pages to reflow: 1280 enlarged four times."""
DESK: Final = 1280


def why_not() -> str:
    """Return why no browser can be started here, and what helps; empty if one can."""
    if missing := [program for program in _PROGRAMS if not shutil.which(program)]:
        return f"no {' and no '.join(missing)}: apt install chromium chromium-driver"
    if os.geteuid() == 0 or _SANDBOX.exists():
        return ""
    # What Chromium itself tries: it does not start without its sandbox.
    allowed = subprocess.run(["unshare", "--user", "true"], capture_output=True, check=False).returncode == 0
    return "" if allowed else "Chromium has no sandbox, and there are no user namespaces: apt install chromium-sandbox"


def has_axe() -> bool:
    return _AXE.exists()


class Browser:
    """One Chromium. It reaches loopback alone."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        self.driver.get(address)

    def run(self, script: str, *arguments: object) -> Any:
        """Run JavaScript as a debugger does, whatever the page's policy, and return its result."""
        return self.driver.execute_script(script, *arguments)

    def press(self, *keys: str) -> None:
        """Press keys one after the other, or type texts."""
        chain = ActionChains(self.driver, duration=0)
        for key in keys:
            chain.send_keys(key)
        chain.perform()

    def focused(self) -> str:
        """Return what has the focus, in words: its visible text, label or element's name."""
        return str(
            self.run(
                "const one = document.activeElement;"
                "return (one.getAttribute('aria-label') || one.name || one.innerText || one.localName).trim();"
            )
        )

    def text(self, selector: str = "body") -> str:
        """Return what is to be read there; all of it, where several elements are."""
        script = "return [...document.querySelectorAll(arguments[0])].map(one => one.innerText).join('\\n')"
        return str(self.run(script, selector))

    def texts(self, selector: str) -> list[str]:
        return list(self.run("return [...document.querySelectorAll(arguments[0])].map(one => one.innerText)", selector))

    def be(self, width: int = DESK, height: int = 800, *, dark: bool = False, scripts: bool = True) -> None:
        """Be a screen of this size in CSS pixels, light or dark, with or without JavaScript."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < DESK}
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._command("Emulation.setDeviceMetricsOverride", **metrics)
        self._command("Emulation.setEmulatedMedia", features=features)
        self._command("Emulation.setScriptExecutionDisabled", value=not scripts)

    def is_cut_off(self) -> bool:
        """Whether one must scroll to the side to read the page."""
        return bool(self.run("return document.documentElement.scrollWidth > document.documentElement.clientWidth"))

    def complaints(self) -> list[str]:
        """Return what the page has written to the console since the last call, violations of its policy too."""
        return [f"{line['level']}: {line['message']}" for line in self.driver.get_log("browser")]

    def violations(self) -> list[str]:
        """Return what axe-core finds against WCAG 2, levels A and AA, each with the elements."""
        self.run(_AXE.read_text())
        found = self.driver.execute_async_script(
            "const done = arguments[arguments.length - 1];"
            "axe.run({runOnly: arguments[0]}).then(result => done(result.violations), error => done(String(error)));",
            list(_RULES),
        )
        assert isinstance(found, list), found
        return [f"{one['id']}: {[node['html'] for node in one['nodes']]}" for one in found]

    def forget(self) -> None:
        """Forget cookies and what earlier tests have set."""
        self._command("Network.clearBrowserCookies")
        self.be()
        self.driver.get("about:blank")
        self.complaints()

    def picture(self, address: str, file: Path) -> None:
        """Open a page, and save the top of it as a PNG, without scroll bars."""
        self._command("Emulation.setScrollbarsHidden", hidden=True)
        self.open(address)
        self.driver.save_screenshot(str(file))

    def _command(self, name: str, **arguments: object) -> None:
        self.driver.execute_cdp_cmd(name, arguments)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run Chromium with an empty profile."""
    options = ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    arguments = ["--headless=new", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run", "--no-proxy-server"]
    arguments += ["--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    if os.geteuid() == 0:
        # Chromium's sandbox refuses root.
        arguments.append("--no-sandbox")
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        for argument in [*arguments, f"--user-data-dir={profile}"]:
            options.add_argument(argument)
        # HOME: an ordinary user of CI may have none that can be written.
        service = Service(str(shutil.which("chromedriver")), env={**os.environ, "HOME": profile})
        driver = Chrome(options=options, service=service)
        try:
            driver.set_page_load_timeout(HANG_SECONDS)
            driver.set_script_timeout(HANG_SECONDS)
            yield Browser(driver)
        finally:
            driver.quit()
