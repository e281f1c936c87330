# SPDX-License-Identifier: Apache-2.0
"""What comes from outside stays text; what goes wrong is said in words."""

import pytest
from playwright.sync_api import expect

from tests.serving.http.page.fake_api import STATS, Refuse, Say
from tests.serving.http.page.test_page_chat import PROMPT, send, settled, until

INJECTED = (
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg onload='window.hit = 1'>",
    "<iframe srcdoc='<script>parent.hit = 1</script>'></iframe>",
    "[click](javascript:window.hit=1)",
    "![x](http://192.0.2.1/leak.png)",
    "<a href='javascript:window.hit = 1'>x</a>",
    "`<b>`\n\n```html\n</code></pre><script>window.hit = 1</script>\n```",
    "<style>body { display: none }</style>",
    "&lt;script&gt; &amp; \x00 \u2028",
)


@pytest.mark.parametrize("place", ["answer", "user", "reasoning", "call", "fault", "model", "token"])
def test_markup_from_outside_is_text(opened, server, place):
    page, watched = opened()
    text = "\n\n".join(INJECTED)
    shown = {"user": ".said", "reasoning": ".reasoning .words", "call": ".call", "fault": ".fault-box"}
    shown |= {"token": ".token", "model": "#model-name"}
    call = {"index": 0, "id": text, "function": {"name": text, "arguments": text}}
    if place == "fault":
        watched.statuses.add(400)
        server.script.append(Refuse(400, text))
    elif place == "model":
        server.models = [{**server.models[0], "id": text}]
        server.stats = {**STATS, "model": server.models[0], "version": text}
        page.reload()
    else:
        said = {"reasoning": text} if place == "reasoning" else {}
        server.script.append(Say([text], calls=[call] if place == "call" else [], reasoning=list(said.values())))
    send(page, text if place == "user" else "go")
    settled(page, 1)
    if place == "reasoning":
        page.get_by_text("Reasoning", exact=True).click()
    if place == "token":
        page.locator(".token").first.hover()
        expect(page.locator("#probabilities")).to_contain_text("<script>window.hit")
    expect(page.locator(shown.get(place, ".answer > .words")).first).to_contain_text("<script>window.hit = 1</script>")
    page.reload()
    page.wait_for_timeout(200)
    assert page.evaluate("window.hit") is None
    made = page.evaluate("document.querySelectorAll('main :is(script, img, iframe, a, style, object, embed)').length")
    assert made == 0


def test_no_file_of_the_page_makes_markup_of_text():
    from serving.http.page import page_files

    for name, body in page_files().items():
        for word in (b"innerHTML", b"outerHTML", b"insertAdjacentHTML", b"document.write", b"eval(", b"new Function"):
            assert word not in body, f"{name} has {word.decode()}"
        addresses = body.replace(b"http://www.w3.org/2000/svg", b"")
        assert b"http://" not in addresses and b"https://" not in addresses, f"{name} names another host"
        assert b' style="' not in body, f"{name} has a style that the policy forbids"


def test_odd_text_is_shown_and_leaves_the_page_in_order(page, server):
    pieces = [
        "‮reversed‬",
        " עברית ",
        "a\u0301\u0301\u0301",
        "👩‍👩‍👧",
        "\u0000",
        "�",
        "\u200b",
        b"\xff\xfe",
        "\n" * 9,
        ".",
    ]
    server.script.append(Say(pieces))
    send(page, "‮odd")
    settled(page, 1)
    expect(page.locator(".answer > .words")).to_contain_text("עברית")
    for at in range(page.locator(".token").count()):
        page.locator(".token").nth(at).focus()
        expect(page.locator("#probabilities")).to_be_visible()
    # The buttons after it still read from left to right.
    boxes = [page.get_by_role("button", name=name).bounding_box()["x"] for name in ("Copy", "Regenerate", "Same seed")]
    assert boxes == sorted(boxes)


def test_a_key_is_asked_for_kept_in_the_tab_and_sent(opened, server):
    server.key = "secret"
    page, watched = opened()
    watched.statuses.add(401)
    expect(page.locator("#key-form")).to_be_visible()
    expect(page.locator("#state-text")).to_have_text("asks for a key")
    page.fill("#key", "wrong")
    page.get_by_role("button", name="Use key").click()
    expect(page.locator("#key-fault")).to_have_text("The server does not know this key.")
    page.fill("#key", "secret")
    page.get_by_role("button", name="Use key").click()
    expect(page.locator("#key-form")).to_be_hidden()
    expect(page.locator("#state-text")).to_have_text("serving")
    send(page, "hello")
    settled(page, 1)
    assert server.authorizations[-1] == "Bearer secret"
    page.reload()
    expect(page.locator("#state-text")).to_have_text("serving")
    assert "secret" not in page.evaluate("JSON.stringify({ ...localStorage }) + location + document.cookie")
    other = watched.open(server.address)
    expect(other.locator("#key-form")).to_be_visible()


def test_a_key_that_is_withdrawn_is_asked_for_again(opened, server):
    page, watched = opened()
    watched.statuses.add(401)
    expect(page.locator("#state-text")).to_have_text("serving")
    server.key = "new"
    send(page, "hello")
    expect(page.locator(".fault-box p")).to_contain_text("The server does not know this key.")
    expect(page.locator("#key-form")).to_be_visible()
    page.fill("#key", "new")
    page.get_by_role("button", name="Use key").click()
    page.get_by_role("button", name="Try again").click()
    settled(page, 1)
    expect(page.locator(".fault-box")).to_be_hidden()
    assert len(server.bodies) == 1


def test_a_busy_server_says_when_to_come_again(opened, server):
    page, watched = opened()
    watched.statuses.add(429)
    server.script.append(Refuse(429, "9 requests wait, and the limit is 9; come again in 2 s.", {"Retry-After": "2"}))
    send(page, "hello")
    expect(page.locator(".fault-box p")).to_have_text(
        "The server is busy, or this key has used its share. Try again in 2 s. "
        "It says: 9 requests wait, and the limit is 9; come again in 2 s."
    )
    again = page.locator(".fault-box button")
    expect(again).to_have_attribute("aria-disabled", "true")
    again.click(force=True)
    assert len(server.bodies) == 1
    expect(again).to_have_attribute("aria-disabled", "false")
    again.click()
    settled(page, 1)
    expect(page.locator(".facts")).to_contain_text("12 tokens")
    assert server.bodies[0] == server.bodies[1]


def test_a_server_that_loads_says_how_far_it_is_and_then_serves(opened, server):
    loading = {"stage": "load", "done": 134_500_000, "total": 269_000_000}
    server.stats = {**dict.fromkeys(STATS), "state": "loading", "loading": loading}
    server.models = []
    page, watched = opened()
    watched.statuses.add(503)
    expect(page.locator("#loading-text")).to_contain_text("Load: 135 MB of 269 MB.")
    expect(page.locator("#loading-meter")).to_have_attribute("aria-valuenow", "50")
    server.script.append(Refuse(503, "the server loads its model", {"Retry-After": "5"}))
    send(page, "early")
    expect(page.locator(".fault-box p")).to_contain_text("The server is not ready. Try again in 5 s.")
    server.models, server.stats = [STATS["model"]], STATS
    expect(page.locator("#state-text")).to_have_text("serving")
    expect(page.locator("#loading")).to_be_hidden()
    expect(page.locator("#model-name")).to_have_text("fake-1b")
    expect(page.locator("#announcer")).to_contain_text("The server: serving.")


def test_a_server_that_is_gone_is_said_to_be(opened, server):
    page, watched = opened()
    watched.statuses |= {0}
    expect(page.locator("#state-text")).to_have_text("serving")
    page.route("**/*", lambda route: route.abort())
    send(page, "hello?")
    expect(page.locator(".fault-box p")).to_have_text("The server cannot be reached. Is it running?")
    expect(page.locator("#state-text")).to_have_text("cannot be reached")
    page.unroute("**/*")
    expect(page.locator("#state-text")).to_have_text("serving")
    watched.faults = [fault for fault in watched.faults if "ERR_FAILED" not in fault]


def test_the_figures_are_shown_as_they_come(page, server):
    figures = page.locator("#figures")
    expect(figures).to_contain_text("Generating42 tokens/s")
    for text in ("Running3 of 8", "Waiting2", "use20 % of 100 blocks", "snapshots2 of 8", "cache25 %", "accepted70 %"):
        expect(figures).to_contain_text(text)
    expect(page.locator(".places")).to_have_attribute(
        "aria-label", "Accepted by place in a draft. 1: 90 %, 2: 60 %, 3: 30 %"
    )
    server.stats = {**STATS, "generated_tokens_per_s": 128.4, "requests": {**STATS["requests"], "waiting": 31}}
    expect(figures).to_contain_text("Generating128 tokens/s")
    expect(figures).to_contain_text("Waiting31")
    line = page.locator(".spark .line").first
    until(page, lambda: line.get_attribute("d").count("L") >= 1)


def test_a_model_without_snapshots_or_drafts_has_no_such_figures(page, server):
    server.stats = {**STATS, "snapshots": None, "drafts": None, "prefix_hit_rate": None, "recent_prefix_hit_rate": None}
    page.reload()
    expect(page.locator("#figures")).to_contain_text("found in cache–")
    expect(page.locator("#figures")).not_to_contain_text("snapshots")
    expect(page.locator("#figures")).not_to_contain_text("Drafts")


def test_another_model_in_the_place_of_the_first_is_named_and_asked_for(page, server):
    expect(page.locator("#model-name")).to_have_text("fake-1b")
    server.models = [{**STATS["model"], "id": "next-2b", "fingerprint": "beef"}]
    server.stats = {**STATS, "model": server.models[0]}
    expect(page.locator("#model-name")).to_have_text("next-2b")
    send(page, "you there")
    settled(page, 1)
    assert server.bodies[0]["model"] == "next-2b"


def test_a_page_that_nobody_looks_at_asks_for_nothing(page, server):
    expect(page.locator("#state-text")).to_have_text("serving")
    page.evaluate(
        """() => {
             Object.defineProperty(document, "hidden", { value: true, configurable: true });
             document.dispatchEvent(new Event("visibilitychange"));
           }"""
    )
    page.wait_for_timeout(1500)
    asked = len(server.authorizations)
    page.wait_for_timeout(1500)
    assert len(server.authorizations) == asked
    page.evaluate(
        """() => {
             delete document.hidden;
             document.dispatchEvent(new Event("visibilitychange"));
           }"""
    )
    until(page, lambda: len(server.authorizations) > asked)


def test_a_browser_that_keeps_nothing_still_talks(opened, server):
    page, _ = opened()
    page.add_init_script(
        """for (const name of ["localStorage", "sessionStorage"]) {
             Object.defineProperty(window, name, { get() { throw new DOMException("no", "SecurityError"); } });
           }"""
    )
    page.reload()
    send(page, "hello")
    settled(page, 1)
    expect(page.locator(PROMPT)).to_be_focused()
