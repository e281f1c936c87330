# SPDX-License-Identifier: Apache-2.0
"""A headless browser, and pages in it that are watched: whatever a page should never do fails its test."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect, sync_playwright

from tests.serving.http.page.fake_api import FakeServer

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
WIDE, PHONE = {"width": 1360, "height": 850}, {"width": 375, "height": 667}
# A busy machine may take its time; what is right does not wait for it.
TIMEOUT_MS = 30_000
# Put into each page before its own scripts: the policy's violations, and how it laid out.
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective} ${event.blockedURI}`);
});
"""


@dataclass
class Watched:
    """Pages of one context. `statuses` are those of answers that a test wants to be errors."""

    context: BrowserContext
    host: str
    statuses: set[int] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def open(self, address: str) -> Page:
        """A page that has loaded."""
        page = self.context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        page.goto(address)
        return page

    def _console(self, message: ConsoleMessage) -> None:
        expected = any(f"status of {status}" in message.text for status in self.statuses)
        if message.type in ("error", "warning") and not expected:
            self.faults.append(f"{message.type}: {message.text}")

    def close(self) -> None:
        """Closes them, and raises what they did."""
        for page in self.context.pages:
            self.faults += page.evaluate("window.violations")
        self.context.close()
        assert not self.faults
        assert self.hosts <= {self.host, ""}, f"the page asked {self.hosts - {self.host}}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for a module: its event loop would be in the way of others' tests."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert path, "there is no Chromium; `make .venv/.browser` installs it"
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A server that says what a test writes down."""
    with FakeServer() as server:
        yield server


@pytest.fixture
def opened(browser: Browser, server: FakeServer) -> Iterator:
    """`opened(**options)`: the page in a context of its own, and what watches it."""
    contexts = []

    def open_page(**options) -> tuple[Page, Watched]:
        context = browser.new_context(**{"viewport": WIDE, "accept_downloads": True, **options})
        context.add_init_script(WATCH)
        watched = Watched(context, urlsplit(server.address).netloc)
        contexts.append(watched)
        return watched.open(server.address), watched

    yield open_page
    for watched in contexts:
        watched.close()


@pytest.fixture
def page(opened) -> Page:
    """The page on a wide screen."""
    return opened()[0]
