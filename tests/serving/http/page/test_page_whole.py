# SPDX-License-Identifier: Apache-2.0
"""The page and a real server: a tiny model behind the HTTP front, with a thread and an event loop of its own."""

import asyncio
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, expect

from metrale_jax import LLM
from serving.core.keys import KeyRing
from serving.http.desk import Desk
from serving.http.server import make_http_server
from serving.http.settings import HttpSettings
from tests.serving.http.page.conftest import WATCH, WIDE, Watched
from tests.serving.http.page.test_page_chat import send, settled, until
from tests.serving.tiny_chat import write_tiny_chat
from tests.serving.whole_server import WholeServer, whole_server


class Running:
    """A whole server, and its HTTP front's port, from `start` to `stop`. `pause_s` lies before each of its steps."""

    def __init__(self, llm: LLM):
        self.llm, self.pause_s = llm, 0.0
        self._step, llm.step = llm.step, self._paced
        self.server: WholeServer | None = None
        self.port = 0
        self._ready, self._loop, self._end = threading.Event(), None, asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="whole server")

    def start(self) -> None:
        """Returns when it serves."""
        self._thread.start()
        assert self._ready.wait(120)

    def stop(self) -> None:
        """Drains it; the engine checks itself."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _paced(self) -> bool:
        time.sleep(self.pause_s)
        return self._step()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with whole_server(self.llm, KeyRing.anonymous()) as self.server:
            settings = HttpSettings(port=0)
            desk = Desk(self.server.service, self.server.lifecycle, settings, "1.2.3", stats=self.llm.stats)
            front = make_http_server(desk)
            self.port = await front.start()
            self._ready.set()
            await self._end.wait()
            await front.drain(5)
            await self.server.quiet()


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[Running]:
    """One server for the module."""
    directory = write_tiny_chat(tmp_path_factory.mktemp("tiny"))
    llm = LLM(directory, max_sequences=4, max_context_tokens=512, prefill_tokens=32, kv_cache_mib=1)
    running = Running(llm)
    running.start()
    yield running
    running.stop()


@pytest.fixture
def page(browser, running) -> Iterator[Page]:
    """The page that this server serves."""
    context = browser.new_context(viewport=WIDE)
    context.add_init_script(WATCH)
    address = f"http://127.0.0.1:{running.port}/"
    watched = Watched(context, urlsplit(address).netloc)
    page = watched.open(address)
    expect(page.locator("#state-text")).to_have_text("serving")
    yield page
    watched.close()


def test_a_real_model_answers_and_the_same_seed_gives_the_same_answer(page, running):
    page.fill("#sampling [name=max_tokens]", "24")
    page.fill("#sampling [name=temperature]", "1.5")
    send(page, "Say anything.")
    settled(page, 1)
    expect(page.locator(".facts")).to_contain_text("tokens/s")
    page.get_by_role("button", name="Same seed").click()
    expect(page.locator(".verdict.same")).to_contain_text("The same answer")
    one, other = running.server.records[-2:]
    assert one.generated_tokens == other.generated_tokens > 0
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".branches")).to_have_text("2 of 2")
    settled(page, 1)
    page.get_by_role("button", name="Same seed").click()
    expect(page.locator(".verdict.same")).to_contain_text("The same answer")


def test_a_real_answer_has_probabilities(page):
    page.fill("#sampling [name=max_tokens]", "12")
    page.fill("#sampling [name=temperature]", "0.4")
    send(page, "Say anything.")
    settled(page, 1)
    token = page.locator(".token").first
    expect(token).to_be_attached()
    token.focus()
    rows = page.locator("#probabilities ul").first.locator("li")
    until(page, lambda: rows.count() >= 6)
    assert rows.last.inner_text().startswith("all others")


def test_stop_ends_a_real_request(page, running):
    before, running.pause_s = len(running.server.records), 0.05
    page.fill("#sampling [name=max_tokens]", "400")
    # Greedy, this model goes round in circles.
    page.fill("#sampling [name=temperature]", "0")
    send(page, "Go on for long.")
    until(page, lambda: page.locator(".token").count() >= 3)
    page.keyboard.press("Escape")
    settled(page, 1)
    expect(page.locator(".facts")).to_contain_text("stopped")
    until(page, lambda: len(running.server.records) > before)
    assert running.server.records[-1].outcome == "cancelled"
    running.pause_s = 0.0
    until(page, lambda: running.llm.stats().num_running == 0)


def test_every_setting_of_the_form_is_one_that_the_server_knows(page, running):
    for name, value in {
        "temperature": "0.7",
        "top_p": "0.9",
        "top_k": "40",
        "min_p": "0.05",
        "repetition_penalty": "1.1",
        "max_tokens": "8",
        "seed": "4294967295",
        "system": "Be brief.",
    }.items():
        page.fill(f"#sampling [name={name}]", value)
    for kind in ("text", "json_object", "json_schema"):
        page.select_option("#sampling [name=format]", kind)
        if kind == "json_schema":
            page.fill("#sampling [name=schema]", '{"type": "object", "properties": {"a": {"type": "integer"}}}')
        send(page, kind)
        settled(page, ("text", "json_object", "json_schema").index(kind) + 1)
    assert page.locator(".fault-box:visible").all_inner_texts() == []
    assert [record.outcome for record in running.server.records[-3:]] == ["ok"] * 3


def test_real_figures_are_shown(page, running):
    figures = page.locator("#figures")
    expect(figures).to_contain_text("of 4")
    expect(figures).to_contain_text("blocks")
    expect(page.locator("#model-name")).to_have_text("tiny")
    page.fill("#sampling [name=max_tokens]", "16")
    send(page, "Figures.")
    settled(page, 1)
    expect(page.locator("#context-text")).to_contain_text("of 512 tokens")
    expect(figures).not_to_contain_text("Generating0 tokens/s")
