# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.serving.http.page.fake_api import MODEL, Refuse, Say

PROMPT, ANSWERS = "#prompt", ".message.answer"


def send(page: Page, text: str) -> None:
    """Types a message and sends it."""
    page.fill(PROMPT, text)
    page.press(PROMPT, "Enter")


def settled(page: Page, count: int) -> None:
    """Waits until so many answers are there, whole."""
    expect(page.locator(f"{ANSWERS}[aria-busy=false]")).to_have_count(count)


def until(page: Page, holds) -> None:
    """Waits for something on the server's side."""
    for _ in range(3000):
        if holds():
            return
        page.wait_for_timeout(10)
    raise AssertionError("it never came true")


def test_a_message_is_sent_and_its_answer_streams(page, server):
    answer = Say(["Light", "houses", " glow"], pause_after=2)
    server.script.append(answer)
    send(page, "Why?")
    expect(page.locator(".message.user .said")).to_have_text("Why?")
    expect(page.locator(f"{ANSWERS} > .words")).to_have_text("Lighthouses")
    expect(page.locator(ANSWERS)).to_have_attribute("aria-busy", "true")
    answer.go.set()
    expect(page.locator(f"{ANSWERS} > .words")).to_have_text("Lighthouses glow")
    settled(page, 1)
    body = server.bodies[0]
    assert body["messages"] == [{"role": "user", "content": "Why?"}]
    assert (body["model"], body["stream"], body["stream_options"]) == (MODEL["id"], True, {"include_usage": True})
    assert (body["logprobs"], body["top_logprobs"]) == (True, 5)
    expect(page.locator(".facts")).to_contain_text(f"seed {body['seed']} · 3 tokens")
    expect(page.locator("#context-text")).to_have_text("43 of 4,096 tokens")
    expect(page.locator("#announcer")).to_contain_text("Lighthouses glow")


def test_the_next_message_tells_what_was_said_before(page, server):
    server.script += [Say(["One"]), Say(["Two"])]
    send(page, "first")
    settled(page, 1)
    send(page, "second")
    settled(page, 2)
    said = [(message["role"], message["content"]) for message in server.bodies[1]["messages"]]
    assert said == [("user", "first"), ("assistant", "One"), ("user", "second")]


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_ends_the_request_on_the_server_too(page, server, how):
    server.script.append(Say(["So", " far", " never"], pause_after=2))
    send(page, "go on")
    expect(page.locator(f"{ANSWERS} > .words")).to_have_text("So far")
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    settled(page, 1)
    until(page, lambda: server.num_left == 1)
    expect(page.locator(".facts")).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_regenerate_draws_another_seed_and_keeps_both_answers(page, server):
    server.script += [Say(["First"]), Say(["Second"])]
    send(page, "again")
    settled(page, 1)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(f"{ANSWERS} > .words")).to_have_text("Second")
    one, other = server.bodies
    assert one["messages"] == other["messages"] and one["seed"] != other["seed"]
    expect(page.locator(".branches")).to_have_text("2 of 2")
    page.get_by_role("button", name="Version before").click()
    expect(page.locator(f"{ANSWERS} > .words")).to_have_text("First")
    expect(page.locator(".facts")).to_contain_text(str(one["seed"]))


def test_to_edit_a_message_makes_a_branch_and_the_other_stays(page, server):
    server.script += [Say(["Old"]), Say(["New"])]
    send(page, "before")
    settled(page, 1)
    page.get_by_role("button", name="Edit").click()
    field = page.get_by_label("Your message, changed")
    expect(field).to_be_focused()
    field.fill("after")
    page.get_by_role("button", name="Send as a branch").click()
    expect(page.locator(f"{ANSWERS} > .words")).to_have_text("New")
    assert server.bodies[1]["messages"] == [{"role": "user", "content": "after"}]
    page.get_by_role("button", name="Version before").click()
    expect(page.locator(".said")).to_have_text("before")
    expect(page.locator(f"{ANSWERS} > .words")).to_have_text("Old")


def test_leaving_an_edit_changes_nothing(page, server):
    send(page, "kept")
    settled(page, 1)
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Your message, changed").fill("thrown away")
    page.keyboard.press("Escape")
    expect(page.locator(".said")).to_have_text("kept")
    expect(page.get_by_role("button", name="Edit")).to_be_focused()
    assert len(server.bodies) == 1


def test_the_same_seed_is_shown_to_give_the_same_answer(page, server):
    send(page, "promise")
    settled(page, 1)
    page.get_by_role("button", name="Same seed").click()
    expect(page.locator(".verdict.same")).to_have_text("The same answer: all 12 tokens.")
    assert server.bodies[0] == server.bodies[1]


def test_another_answer_to_the_same_seed_is_shown_with_where_it_parts(page, server):
    server.script += [Say(["a", " b", " c"]), Say(["a", " x", " c"])]
    send(page, "promise")
    settled(page, 1)
    page.get_by_role("button", name="Same seed").click()
    expect(page.locator(".verdict.different")).to_have_text("Different from token 2 on: “·b” then, “·x” now.")
    expect(page.locator(f"{ANSWERS} > .words")).to_have_text("a b c")


def test_a_stopped_answer_is_held_to_as_far_as_it_went(page, server):
    server.script += [Say(["a", " b", " c"], pause_after=2), Say(["a", " b", " c", " d"], pause_after=3)]
    send(page, "promise")
    expect(page.locator(f"{ANSWERS} > .words")).to_have_text("a b")
    page.keyboard.press("Escape")
    settled(page, 1)
    page.get_by_role("button", name="Same seed").click()
    expect(page.locator(".verdict.same")).to_contain_text("as far as it went")
    until(page, lambda: server.num_left == 2)


def test_without_probabilities_answers_are_compared_by_what_they_say(page, server):
    server.logprobs_sent = False
    server.script += [Say(["same"]), Say(["sa", "me"]), Say(["sane"])]
    send(page, "promise")
    settled(page, 1)
    page.get_by_role("button", name="Same seed").click()
    expect(page.locator(".verdict.same")).to_have_text("The same answer: all 4 characters.")
    page.get_by_role("button", name="Same seed").click()
    expect(page.locator(".verdict.different")).to_have_text("Different from character 3 on: “m” then, “n” now.")


def test_what_the_form_says_is_asked_for(page, server):
    for name, value in {
        "temperature": "0.7",
        "top_p": "0.9",
        "top_k": "40",
        "min_p": "0.05",
        "repetition_penalty": "1.1",
        "max_tokens": "64",
        "seed": "1234",
        "system": "Be brief.",
    }.items():
        page.fill(f"#sampling [name={name}]", value)
    page.uncheck("#sampling [name=probabilities]")
    page.select_option("#sampling [name=format]", "json_schema")
    schema = {"type": "object", "properties": {"why": {"type": "string"}}}
    page.fill("#sampling [name=schema]", json.dumps(schema))
    send(page, "all of it")
    settled(page, 1)
    body = server.bodies[0]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert {name: body[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")} == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
    }
    assert (body["max_tokens"], body["seed"]) == (64, 1234)
    assert body["response_format"] == {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    assert "logprobs" not in body and "top_logprobs" not in body


def test_an_empty_form_asks_for_nothing_but_a_seed(page, server):
    send(page, "plainly")
    settled(page, 1)
    assert set(server.bodies[0]) == set("model messages seed logprobs top_logprobs stream stream_options".split())
    page.click("#sampling [type=reset]")
    expect(page.locator("#sampling [name=seed]")).to_have_value("")


@pytest.mark.parametrize(
    "name, value, fault",
    [
        ("top_p", "1.5", "Top p goes from 0 to 1."),
        ("max_tokens", "0", "Max tokens begins at 1."),
        ("seed", "1.5", "Seed is a whole number."),
    ],
    ids=["top_p", "max_tokens", "seed"],
)
def test_a_wrong_setting_is_named_and_nothing_is_sent(page, server, name, value, fault):
    page.fill(f"#sampling [name={name}]", value)
    send(page, "wait")
    expect(page.locator("#sampling-fault")).to_have_text(fault)
    expect(page.locator(f"#sampling [name={name}]")).to_be_focused()
    expect(page.locator(PROMPT)).to_have_value("wait")
    assert not server.bodies


def test_a_schema_that_is_no_json_is_named(page, server):
    page.select_option("#sampling [name=format]", "json_schema")
    page.fill("#sampling [name=schema]", "{")
    send(page, "wait")
    expect(page.locator("#sampling-fault")).to_have_text("Schema: this is no JSON.")
    assert not server.bodies


def test_reasoning_is_folded_and_calls_of_tools_are_shown(page, server):
    head = {"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": '{"place":'}}
    tail = {"index": 0, "function": {"arguments": '"Kiel"}'}}
    server.script.append(Say(["See", " there"], reasoning=["Hm", ", well"], calls=[head, tail], finish="tool_calls"))
    send(page, "weather?")
    settled(page, 1)
    thought = page.locator(".reasoning .words")
    expect(thought).to_be_hidden()
    page.get_by_text("Reasoning", exact=True).click()
    expect(thought).to_have_text("Hm, well")
    expect(page.locator(f"{ANSWERS} > .words")).to_have_text("See there")
    expect(page.locator(".call p")).to_have_text("Calls weather")
    expect(page.locator(".call pre")).to_have_text('{\n  "place": "Kiel"\n}')
    expect(page.locator(".facts")).to_contain_text("asks for a tool")


def test_enter_sends_and_shift_enter_breaks_the_line(page, server):
    page.click(PROMPT)
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Control+Enter")
    settled(page, 1)
    assert server.bodies[0]["messages"][0]["content"] == "one\ntwo"


def test_a_reload_keeps_the_conversation_its_checks_and_the_settings(page, server):
    page.fill("#sampling [name=temperature]", "0.5")
    send(page, "remember")
    settled(page, 1)
    page.get_by_role("button", name="Same seed").click()
    expect(page.locator(".verdict.same")).to_be_visible()
    said = page.locator(f"{ANSWERS} > .words").inner_text()
    page.reload()
    expect(page.locator(".said")).to_have_text("remember")
    expect(page.locator(f"{ANSWERS} > .words")).to_have_text(said)
    expect(page.locator(".verdict.same")).to_be_visible()
    expect(page.locator("#sampling [name=temperature]")).to_have_value("0.5")
    page.locator(".token").first.hover()
    expect(page.locator("#probabilities")).to_be_visible()


def test_a_reload_in_the_middle_of_an_answer_keeps_what_had_come(page, server):
    server.script.append(Say(["So", " far", " never"], pause_after=2))
    send(page, "go on")
    expect(page.locator(f"{ANSWERS} > .words")).to_have_text("So far")
    page.reload()
    expect(page.locator(f"{ANSWERS} > .words")).to_have_text("So far")
    expect(page.locator(".facts")).to_contain_text("stopped")
    until(page, lambda: server.num_left == 1)


def test_several_chats_stand_beside_each_other_until_they_are_deleted(page, server):
    send(page, "the first")
    settled(page, 1)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(PROMPT)).to_be_focused()
    send(page, "the second")
    settled(page, 1)
    page.locator("#chat-list").get_by_text("the first").click()
    expect(page.locator(".said")).to_have_text("the first")
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("button", name="Keep").click()
    expect(page.locator(".chat")).to_have_count(2)
    page.get_by_role("button", name="Delete", exact=True).click()
    page.locator("#ask-yes").click()
    expect(page.locator(".said")).to_have_text("the second")
    page.get_by_role("button", name="Clear all").click()
    page.locator("#ask-yes").click()
    expect(page.locator(".welcome")).to_be_visible()
    page.reload()
    expect(page.locator(".welcome")).to_be_visible()


def test_a_chat_that_is_deleted_while_it_is_answered_stays_deleted(page, server):
    server.script.append(Say(["So", " far", " never"], pause_after=2))
    send(page, "go on")
    expect(page.locator(f"{ANSWERS} > .words")).to_have_text("So far")
    page.get_by_role("button", name="Delete", exact=True).click()
    page.locator("#ask-yes").click()
    until(page, lambda: server.num_left == 1)
    page.reload()
    expect(page.locator(".welcome")).to_be_visible()


def test_the_export_holds_every_branch(page, server, tmp_path):
    server.script += [Say(["First"]), Say(["Second"])]
    send(page, "again")
    settled(page, 1)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(f"{ANSWERS} > .words")).to_have_text("Second")
    settled(page, 1)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    download.value.save_as(tmp_path / "chat.json")
    exported = json.loads(Path(tmp_path / "chat.json").read_text())
    assert exported["format"] == "metrale-chat-1" and exported["title"] == "again"
    assert [message["content"] for message in exported["messages"]] == ["again", "First", "Second"]
    assert exported["messages"][1]["asked"]["seed"] == server.bodies[0]["seed"]


def test_what_is_kept_is_bounded_and_the_oldest_goes_first(page, server):
    page.evaluate(
        """for (let chat = 0; chat < 60; chat += 1) {
             const message = { id: "m", parent: null, role: "user", content: "x".repeat(40000), at: chat };
             localStorage.setItem(`metrale.chat.old${chat}`, JSON.stringify(
               { id: `old${chat}`, at: chat, messages: [message], chosen: {} }));
           }"""
    )
    send(page, "one more")
    settled(page, 1)
    until(page, lambda: page.evaluate("Object.keys(localStorage).filter((one) => one.includes('chat.')).length") == 50)
    assert page.evaluate("localStorage.getItem('metrale.chat.old0')") is None
    assert page.evaluate("localStorage.getItem('metrale.chat.old59')") is not None


def test_probabilities_of_old_chats_make_room_before_their_words_do(page, server):
    page.evaluate(
        """const entry = { token: "y".repeat(1000), logprob: 0, bytes: null, top_logprobs: [] };
           const message = { id: "m", parent: null, role: "assistant", content: "y", entries: Array(1400).fill(entry) };
           for (const id of ["a", "b"]) localStorage.setItem(`metrale.chat.${id}`, JSON.stringify(
             { id, at: id === "a" ? 1 : 2, messages: [message], chosen: {} }));"""
    )
    server.script.append(Say(["z" * 100_000]))
    send(page, "one more")
    settled(page, 1)
    sizes = {name: page.evaluate(f"localStorage.getItem('metrale.chat.{name}').length") for name in "ab"}
    assert sizes["a"] < 1000 and sizes["b"] > 1_000_000


def test_one_of_several_models_is_chosen(page, server):
    server.models = [MODEL, {**MODEL, "id": "other-1b"}]
    page.reload()
    page.get_by_label("Model", exact=True).select_option("other-1b")
    send(page, "you there")
    settled(page, 1)
    assert server.bodies[0]["model"] == "other-1b"


def test_after_an_error_the_same_is_asked_again(page, opened, server):
    server.script += [Say(["half"], error="the engine could not run a step"), Say(["whole"])]
    send(page, "try")
    expect(page.locator(".fault-box p")).to_have_text("the engine could not run a step")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(f"{ANSWERS} > .words")).to_have_text("whole")
    expect(page.locator(".fault-box")).to_be_hidden()
    assert server.bodies[0] == server.bodies[1]


def test_an_answer_that_breaks_off_is_said_to(page, server):
    server.script.append(Say(["half"], breaks=True))
    send(page, "try")
    expect(page.locator(".fault-box p")).to_have_text("The answer broke off before its end.")
    expect(page.locator(f"{ANSWERS} > .words")).to_have_text("half")


def test_a_message_goes_on_past_an_answer_that_never_began(opened, server):
    page, watched = opened()
    watched.statuses.add(500)
    server.script += [Refuse(500, "oh"), Say(["fine"])]
    send(page, "one")
    expect(page.locator(".fault-box p")).to_have_text("The server made a mistake. It says: oh")
    send(page, "two")
    expect(page.locator(f"{ANSWERS} > .words")).to_have_text("fine")
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["one", "two"]
