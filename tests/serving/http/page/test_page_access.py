# SPDX-License-Identifier: Apache-2.0
"""For everybody: by keyboard alone, by ear, on a phone, in the dark, without motion."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.serving.http.page.conftest import PHONE, WIDE
from tests.serving.http.page.fake_api import STATS, FakeServer, Refuse, Say
from tests.serving.http.page.test_page_chat import PROMPT, send, settled

SCREENS = {
    "light-wide": {"viewport": WIDE, "color_scheme": "light"},
    "dark-wide": {"viewport": WIDE, "color_scheme": "dark"},
    "light-phone": {"viewport": PHONE, "color_scheme": "light", "has_touch": True},
    "dark-phone": {"viewport": PHONE, "color_scheme": "dark", "has_touch": True},
}
MARKED = ["## Why\n\n", "**Bold**", " and `code`", " here\n\n", "- a list\n\n", "```\ncode\n```\n\n", "> said\n"]
CALL = {"index": 0, "id": "c", "function": {"name": "look", "arguments": '{"at": 1}'}}
LOADING = {
    **dict.fromkeys(STATS),
    "state": "loading",
    "loading": {"stage": "load", "done": 120_000_000, "total": 269_000_000},
}


def furnished(page: Page, server: FakeServer) -> None:
    """A conversation with one of everything in it, after what was said before."""
    before = page.locator(".answer").count()
    server.script += [
        Say(MARKED, reasoning=["Hm"], calls=[CALL]),
        Say(MARKED, reasoning=["Hm"], calls=[CALL]),
        Say(["other"]),
        Say(["else"]),
        Refuse(429, "wait", {"Retry-After": "60"}),
    ]
    send(page, "Why?")
    settled(page, before + 1)
    page.get_by_text("Reasoning", exact=True).last.click()
    page.get_by_role("button", name="Same seed").last.click()
    expect(page.locator(".verdict.same")).to_be_visible()
    send(page, "And?")
    settled(page, before + 2)
    page.get_by_role("button", name="Same seed").last.click()
    expect(page.locator(".verdict.different")).to_be_visible()
    page.evaluate("document.querySelector('[name=tint]').click()")
    send(page, "More?")
    expect(page.locator(".fault-box:visible")).to_have_count(1)


def faults(page: Page) -> list[str]:
    """What axe finds amiss."""
    # Transitions are looked at when they are over.
    page.wait_for_timeout(350)
    found = Axe().run(page).response["violations"]
    nodes = [(one["id"], node) for one in found for node in one["nodes"]]
    return [f"{rule}: {node['html'][:160]} {node['failureSummary'][:200]}" for rule, node in nodes]


def test_the_focus_stays_where_it_is_of_use(page, server):
    server.script += [Say(["One"]), Say(["One"]), Say(["Two", " more"], pause_after=1)]
    send(page, "focus")
    settled(page, 1)
    page.get_by_role("button", name="Same seed").press("Enter")
    expect(page.locator(".verdict.same")).to_be_visible()
    expect(page.get_by_role("button", name="Same seed")).to_be_focused()
    page.get_by_role("button", name="Regenerate").press("Enter")
    expect(page.locator(".answer > .words")).to_have_text("Two")
    expect(page.get_by_role("button", name="Stop")).to_be_focused()
    page.keyboard.press("Enter")
    settled(page, 1)
    page.get_by_role("button", name="Version before").press("Enter")
    expect(page.locator(".answer > .words")).to_have_text("One")
    expect(page.get_by_role("button", name="Version before")).to_be_focused()


@pytest.mark.parametrize("options", SCREENS.values(), ids=SCREENS.keys())
def test_axe_finds_nothing_amiss(opened, server, options):
    page, watched = opened(**options)
    watched.statuses.add(429)
    expect(page.locator("#state-text")).to_have_text("serving")
    assert faults(page) == []
    furnished(page, server)
    assert faults(page) == []
    page.locator(".token").last.focus()
    expect(page.locator("#probabilities")).to_be_visible()
    assert faults(page) == []
    page.get_by_role("button", name="Edit").last.click()
    assert faults(page) == []
    page.keyboard.press("Escape")
    for name in ("Chats", "Settings") if options["viewport"] is PHONE else ():
        page.get_by_role("button", name=name).click()
        assert faults(page) == []
        page.keyboard.press("Escape")
    if options["viewport"] is WIDE:
        page.get_by_role("button", name="Clear all").click()
        assert faults(page) == []
        page.get_by_role("button", name="Keep").click()


@pytest.mark.parametrize("options", SCREENS.values(), ids=SCREENS.keys())
def test_axe_finds_nothing_amiss_while_the_server_loads_or_asks_for_a_key(opened, server, options):
    server.stats = LOADING
    page, watched = opened(**options)
    watched.statuses.add(401)
    expect(page.locator("#loading-meter")).to_be_visible()
    assert faults(page) == []
    server.stats, server.key = STATS, "secret"
    expect(page.locator("#key-form")).to_be_visible()
    page.fill("#key", "wrong")
    page.get_by_role("button", name="Use key").click()
    expect(page.locator("#key-fault")).not_to_be_empty()
    assert faults(page) == []


# A browser goes on from where the focus was last, even if nothing has it.
TO_THE_BEGINNING = "document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')"


def reached(page: Page, most: int = 80) -> list[str]:
    """What the tab key stops at, from the page's beginning until it leaves the page."""
    page.evaluate(TO_THE_BEGINNING)
    found = []
    for _ in range(most):
        page.keyboard.press("Tab")
        name = page.evaluate(
            """() => {
                 const one = document.activeElement;
                 if (one === document.body) return "";
                 const box = one.getBoundingClientRect();
                 if (!box.width || !box.height) throw new Error(`${one.outerHTML} has the focus and no size`);
                 const style = getComputedStyle(one.type === "radio" ? one.nextElementSibling : one);
                 if (style.outlineStyle === "none") throw new Error(`${one.outerHTML} does not show its focus`);
                 return one.id || one.name || one.textContent.trim().slice(0, 20) || one.className;
               }"""
        )
        if not name:
            return found
        found.append(name)
    raise AssertionError(f"the tab key never leaves the page: {found}")


def test_everything_is_reached_by_the_tab_key_and_shows_that_it_is(opened, server):
    page, watched = opened()
    watched.statuses.add(429)
    furnished(page, server)
    found = reached(page)
    assert found[0] == "Skip to the message b"[:20]
    wanted = "new-chat export delete-chat clear-chats theme transcript prompt send temperature seed system format"
    assert set(wanted.split()) <= set(found)
    assert {"Reasoning", "Copy", "Regenerate", "Same seed", "Edit", "code", "Try again in 60 s"[:9]} <= {
        name[:9] if name.startswith("Try again") else name for name in found
    }
    # Each answer is one stop, however many tokens it has.
    assert len(found) < 50


def test_a_whole_conversation_by_keyboard_alone(page, server):
    server.script += [Say(["So", " it", " is"]), Say(["No", " end"], pause_after=1)]
    page.evaluate(TO_THE_BEGINNING)
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(PROMPT)).to_be_focused()
    page.keyboard.type("Is it?")
    page.keyboard.press("Enter")
    settled(page, 1)
    expect(page.locator(PROMPT)).to_be_focused()
    for _ in range(20):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.textContent.trim()") == "Regenerate":
            break
    page.keyboard.press("Enter")
    expect(page.locator(".answer > .words")).to_have_text("No")
    page.keyboard.press("Escape")
    settled(page, 1)
    expect(page.locator(".facts")).to_contain_text("stopped")
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["Is it?"]


EXCESS = """() => {
  const excess = {};
  for (const place of ["html", "body", "#bar", "#main", "#transcript", "#chats", "#panel", "#composer"]) {
    const one = document.querySelector(place);
    if (one.scrollWidth > one.clientWidth) excess[place] = one.scrollWidth - one.clientWidth;
  }
  return excess;
}"""


def test_nothing_is_wider_than_the_screen(opened, server):
    page, watched = opened(reduced_motion="reduce")
    watched.statuses.add(429)
    server.script.append(Say(["w" * 3000, " ", "https://" + "long/" * 200, "\n\n```\n" + "x" * 500 + "\n```\n"]))
    send(page, "u" * 500)
    settled(page, 1)
    furnished(page, server)
    for width in (320, 375, 700, 1000, 1300, 2000):
        page.set_viewport_size({"width": width, "height": 700})
        assert page.evaluate(EXCESS) == {}, f"at a width of {width}"
        for drawer in ("chats", "panel"):
            if page.locator(f"#open-{drawer}").is_visible():
                page.click(f"#open-{drawer}")
                assert page.evaluate(EXCESS) == {}, f"with {drawer} at a width of {width}"
                page.keyboard.press("Escape")


def test_on_a_phone_the_columns_are_drawers(opened):
    page, _ = opened(viewport=PHONE)
    expect(page.locator("#panel")).to_be_hidden()
    opener = page.get_by_role("button", name="Settings")
    opener.click()
    expect(opener).to_have_attribute("aria-expanded", "true")
    expect(page.locator("#panel [data-close]")).to_be_focused()
    # What lies behind is out of reach.
    assert page.evaluate("document.getElementById('main').inert")
    page.keyboard.press("Escape")
    expect(page.locator("#panel")).to_be_hidden()
    expect(opener).to_be_focused()
    opener.click()
    page.mouse.click(10, 300)
    expect(page.locator("#panel")).to_be_hidden()
    assert not page.evaluate("document.getElementById('main').inert")


def test_a_wrong_setting_is_shown_on_a_phone_too(opened, server):
    page, _ = opened(viewport=PHONE)
    page.get_by_role("button", name="Settings").click()
    page.fill("#sampling [name=top_p]", "2")
    page.keyboard.press("Escape")
    send(page, "wait")
    expect(page.locator("#sampling [name=top_p]")).to_be_focused()
    assert not server.bodies


def paper(page: Page) -> str:
    """The colour behind everything."""
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_a_theme_that_is_chosen_is_kept_and_auto_follows_the_system(opened):
    page, _ = opened(color_scheme="dark")
    dark = paper(page)
    page.get_by_text("Light", exact=True).click()
    light = paper(page)
    assert light != dark
    page.reload()
    assert paper(page) == light
    expect(page.locator("#theme [value=light]")).to_be_checked()
    page.get_by_text("Auto", exact=True).click()
    assert paper(page) == dark
    page.emulate_media(color_scheme="light")
    assert paper(page) == light


def test_who_wants_no_motion_gets_none(opened, server):
    server.stats = LOADING
    page, _ = opened(reduced_motion="reduce", viewport=PHONE)
    expect(page.locator("#loading-meter")).to_be_visible()
    moving = page.evaluate(
        """() => [...document.querySelectorAll("*")].filter((one) => {
                   const { animationName, transitionDuration } = getComputedStyle(one);
                   return animationName !== "none" || !/^0s(, 0s)*$/.test(transitionDuration);
                 }).map((one) => one.outerHTML)"""
    )
    assert moving == []


def test_a_reader_who_scrolled_up_is_left_there(page, server):
    answer = Say([f"line {at}\n\n" for at in range(80)], pause_after=60)
    server.script.append(answer)
    send(page, "long")
    expect(page.get_by_text("line 59", exact=True)).to_be_in_viewport()
    page.locator("#transcript").evaluate("one => { one.scrollTop = 0; }")
    expect(page.locator("#to-end")).to_be_visible()
    answer.go.set()
    settled(page, 1)
    assert page.locator("#transcript").evaluate("one => one.scrollTop") == 0
    page.locator("#to-end").click()
    expect(page.get_by_text("line 79", exact=True)).to_be_in_viewport()
