# SPDX-License-Identifier: Apache-2.0
import pytest
from playwright.sync_api import expect

from tests.serving.http.page.fake_api import FakeServer, Say
from tests.serving.http.page.test_page_chat import send, settled

BOX = "#probabilities"
SMILE = "😀".encode()


def test_a_word_pointed_at_shows_what_else_it_could_have_been(page, server):
    server.script.append(Say(["Ships", " see", " it"]))
    send(page, "why?")
    settled(page, 1)
    expect(page.locator(BOX)).to_be_hidden()
    page.locator(".token", has_text="see").hover()
    rows = page.locator(f"{BOX} li")
    expect(rows).to_have_count(6)
    expect(rows.nth(0)).to_have_class("chosen")
    # exp(-0.5) is 0.607, the four others have exp(-1.7), exp(-2.9) ...
    expect(rows.nth(0)).to_have_text("·see (chosen)61 %")
    expect(rows.nth(1)).to_have_text("·other18 %")
    expect(rows.nth(2)).to_have_text("⏎5.5 %")
    expect(rows.nth(3)).to_have_text("<F0><9F>1.7 %")
    expect(rows.nth(4)).to_have_text("U+202E0.50 %")
    expect(rows.nth(5)).to_contain_text("all others")
    page.mouse.move(5, 400)
    expect(page.locator(BOX)).to_be_hidden()


def test_the_figures_stay_while_the_pointer_goes_to_them_and_escape_hides_them(page, server):
    server.script.append(Say(["Ships", " see", " it"]))
    send(page, "why?")
    settled(page, 1)
    page.locator(".token", has_text="see").hover()
    page.locator(f"{BOX} li").nth(2).hover()
    page.wait_for_timeout(300)
    expect(page.locator(BOX)).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(BOX)).to_be_hidden()


def test_text_that_comes_to_lie_under_a_resting_pointer_shows_nothing(page, server):
    answer = Say(["Ships", " see", " it", *["\n\nmore"] * 40], pause_after=3)
    server.script.append(answer)
    send(page, "why?")
    box = page.locator(".token", has_text="see").bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + 60)
    answer.go.set()
    settled(page, 1)
    page.wait_for_timeout(300)
    expect(page.locator(BOX)).to_be_hidden()
    page.locator(".token", has_text="more").last.hover()
    expect(page.locator(BOX)).to_be_visible()


def test_arrow_keys_go_from_token_to_token(page, server):
    server.script.append(Say(["Ships", " see", " it"]))
    send(page, "why?")
    settled(page, 1)
    words = page.locator(".answer > .words")
    words.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token").nth(0)).to_be_focused()
    expect(page.locator(f"{BOX} .chosen")).to_contain_text("Ships")
    expect(page.locator(".token").nth(0)).to_have_attribute("aria-describedby", "probabilities")
    page.keyboard.press("ArrowRight")
    expect(page.locator(f"{BOX} .chosen")).to_contain_text("·see")
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token").nth(2)).to_be_focused()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Home")
    expect(page.locator(".token").nth(0)).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Copy")).to_be_focused()
    expect(page.locator(BOX)).to_be_hidden()


def test_halves_of_a_character_are_shown_together(page, server):
    server.script.append(Say(["Hi ", SMILE[:2], SMILE[2:], "!"]))
    send(page, "smile")
    settled(page, 1)
    expect(page.locator(".answer > .words")).to_have_text("Hi 😀!")
    expect(page.locator(".token")).to_have_count(3)
    page.locator(".token", has_text="😀").hover()
    expect(page.locator(f"{BOX} ul")).to_have_count(2)
    expect(page.locator(f"{BOX} .chosen").nth(0)).to_contain_text("<F0><9F>")
    expect(page.locator(f"{BOX} .chosen").nth(1)).to_contain_text("<98><80>")


def test_tokens_are_found_inside_of_markdown_and_reasoning(page, server):
    pieces = ["# Ti", "tle\n\n", "- one ", "**bo", "ld**", " `co", "de`\n", "- two\n\n", "```\nx = ", "1\n```\n"]
    server.script.append(Say(pieces, reasoning=["Think", " one"]))
    send(page, "mark")
    settled(page, 1)
    tokens = page.locator(".answer > .words .token").all_inner_texts()
    assert "".join("".join(tokens).split()) == "Titleoneboldcodetwox=1"
    page.locator("li strong .token").first.hover()
    expect(page.locator(f"{BOX} .chosen")).to_contain_text("**bo")
    page.get_by_text("Reasoning", exact=True).click()
    page.locator(".reasoning .token", has_text="one").hover()
    expect(page.locator(f"{BOX} .chosen")).to_contain_text("·one")


def test_unlikely_tokens_are_tinted_where_that_is_wanted(page, server):
    # The fake's probabilities fall with the length of a token: 61 %, 33 %, 18 %, 10 %.
    server.script.append(Say(["abcd", "abcde", "abcdef", "abcdefg"]))
    send(page, "tint")
    settled(page, 1)
    plain = page.locator(".token").nth(2).evaluate("one => getComputedStyle(one).backgroundColor")
    page.check("#sampling [name=tint]")
    tinted = [
        page.locator(".token").nth(at).evaluate("one => getComputedStyle(one).backgroundColor") for at in range(4)
    ]
    assert tinted[0] == plain == "rgba(0, 0, 0, 0)"
    assert tinted[1] != plain and tinted[2] == tinted[3] != tinted[1]


def test_without_log_probabilities_there_is_nothing_to_point_at(page, server):
    server.logprobs_sent = False
    send(page, "bare")
    settled(page, 1)
    expect(page.locator(".token")).to_have_count(0)
    expect(page.locator(".answer > .words")).not_to_have_attribute("tabindex", "0")


def test_a_long_answer_with_all_its_tokens_is_drawn_in_time(page, server):
    server.script.append(Say([f"word{at} " if at % 12 else f"\n\n{at} " for at in range(3000)]))
    send(page, "long")
    settled(page, 1)
    expect(page.locator(".token")).to_have_count(3000)
    page.locator(".token").last.hover()
    expect(page.locator(BOX)).to_be_visible()


# The modules by themselves.


@pytest.fixture(scope="module")
def still(browser):
    """A page that nothing happens on."""
    with FakeServer() as server:
        page = browser.new_page()
        page.goto(server.address)
        yield page
        page.close()


MARKDOWN = [
    ("plain", "one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
    ("emphasis", "a *b* **c _d_** `*e*`", "<p>a <em>b</em> <strong>c <em>d</em></strong> <code>*e*</code></p>"),
    ("no emphasis", "2 * 3 * 4, snake_case_name, a * b*", "<p>2 * 3 * 4, snake_case_name, a * b*</p>"),
    ("escaped", r"\*not\* a \ slash", r"<p>*not* a \ slash</p>"),
    ("headings", "# One\n## Two\n#three", "<h4>One</h4><h4>Two</h4><p>#three</p>"),
    ("list", "- a\n- b\n\nafter", "<ul><li>a</li><li>b</li></ul><p>after</p>"),
    ("numbers", "3. c\n4. d", '<ol start="3"><li>c</li><li>d</li></ol>'),
    ("nested", "- a\n  - b\n  - c\n- d", "<ul><li>a<ul><li>b</li><li>c</li></ul></li><li>d</li></ul>"),
    ("loose", "1. a\n\n   more\n\n2. b", '<ol start="1"><li>a<p>more</p></li><li>b</li></ol>'),
    ("code", "```py\n<b>\n\n# x\n```\nafter", "<pre><code>&lt;b&gt;\n\n# x</code></pre><p>after</p>"),
    ("open code", "~~~\nx", "<pre><code>x</code></pre>"),
    ("code in a list", "- a\n  ```\n  x\n    y\n  ```", "<ul><li>a<pre><code>x\n  y</code></pre></li></ul>"),
    ("quote", "> a\n> - b", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>"),
    ("rule", "a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
    ("table", "|a|b|\n|-|-|\n|1|2|", "<pre><code>|a|b|\n|-|-|\n|1|2|</code></pre>"),
    ("link", "[x](javascript:alert(1))", "<p>[x](javascript:alert(1))</p>"),
    ("html", "<img src=x onerror=alert(1)>", "<p>&lt;img src=x onerror=alert(1)&gt;</p>"),
    ("windows", "a\r\n\r\nb", "<p>a</p><p>b</p>"),
]
DRAWN = """async (text) => {
  const { render } = await import("/page/render.js");
  const bare = (start, end) => (start < end ? [{ start, end, segment: -1 }] : []);
  const tidy = (place) => {
    for (const one of place.querySelectorAll("*")) {
      for (const name of one.getAttributeNames()) if (name !== "start") one.removeAttribute(name);
    }
    return place.innerHTML;
  };
  const grown = document.createElement("div");
  for (let end = 0; end <= text.length; end += 1) render(grown, text.slice(0, end), bare, false);
  const whole = document.createElement("div");
  render(whole, text, bare, true);
  return [tidy(grown), tidy(whole)];
}"""


@pytest.mark.parametrize("text, drawn", [case[1:] for case in MARKDOWN], ids=[case[0] for case in MARKDOWN])
def test_markdown_is_drawn_the_same_whole_and_letter_by_letter(still, text, drawn):
    assert still.evaluate(DRAWN, text) == [drawn, drawn]


HOSTILE = {
    "stars": "*" * 20_000,
    "open": "*a _b `c " * 4000,
    "ticks": "".join("`" * (at % 40 + 1) + "x" for at in range(3000)),
    "quotes": ">" * 5000 + " deep",
    "lists": "".join(" " * at + "- x\n" for at in range(300)),
    "word": "w" * 200_000,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_markdown_takes_no_longer_than_it_should(still, text):
    elapsed_ms = still.evaluate(
        """async (text) => {
             const { render } = await import("/page/render.js");
             const began = performance.now();
             render(document.createElement("div"), text, (start, end) => [{ start, end, segment: -1 }], true);
             return performance.now() - began;
           }""",
        text,
    )
    # Quadratic work on these takes minutes; what is right takes milliseconds.
    assert elapsed_ms < 5000


def test_events_are_read_whatever_the_pieces_they_come_in(still):
    found = still.evaluate(
        r"""async () => {
              const { events } = await import("/page/sse.js");
              const sent = ": hello\r\ndata: {\"a\":1}\r\n\r\nevent: x\ndata: one\ndata:two\n\ndata: 😀\r\rdata: lost";
              const bytes = new TextEncoder().encode(sent);
              const all = [];
              for (let size = 1; size <= bytes.length; size += 1) {
                const body = new ReadableStream({ start(stream) {
                  for (let at = 0; at < bytes.length; at += size) stream.enqueue(bytes.slice(at, at + size));
                  stream.close();
                } });
                const read = [];
                for await (const data of events(body)) read.push(data);
                all.push(JSON.stringify(read));
              }
              return [...new Set(all)];
            }"""
    )
    assert found == ['["{\\"a\\":1}","one\\ntwo","😀"]']
