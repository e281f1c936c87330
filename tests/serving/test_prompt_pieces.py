# SPDX-License-Identifier: Apache-2.0
"""Pieces of prompts: alike where prompts begin alike, and none where there is no prompt."""

import json

import pytest

from serving.prompt_pieces import PROMPTS, pieces_of

TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def chat(messages, **fields):
    return pieces_of("/v1/chat/completions", json.dumps({"messages": messages} | fields).encode())[0]


def test_the_next_turn_of_a_chat_begins_with_the_pieces_of_the_last():
    first = chat(TURNS)
    longer = chat([*TURNS, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Go on"}])
    assert len(first) == 2 and longer[:2] == first and len(longer) == 4


def test_the_order_of_keys_and_what_is_no_prompt_make_no_difference():
    turned = [dict(reversed(turn.items())) for turn in TURNS]
    assert chat(turned, temperature=0, stream=True) == chat(TURNS)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat(TURNS, tools=tools) != chat(TURNS) and chat(TURNS, tools=tools)[1:] == chat(TURNS)


@pytest.mark.parametrize(
    "prompt, pieces",
    [
        ("a text", (b"a text",)),
        (["a text", "another"], (b"a text",)),
        ([1, 22, 333], (b"[1,22,333]",)),
        ([[1, 2], [3]], (b"[1,2]",)),
        ([], (b"[]",)),
    ],
    ids=["text", "texts", "tokens", "lists-of-tokens", "empty"],
)
def test_of_several_prompts_the_first_counts(prompt, pieces):
    assert pieces_of("/v1/completions", json.dumps({"prompt": prompt}).encode()) == (pieces, "")


def test_what_other_apis_put_before_the_messages_is_before_them_here():
    body = {"system": "Be brief.", "messages": TURNS[1:], "cache_salt": "team"}
    pieces, salt = pieces_of("/v1/messages", json.dumps(body).encode())
    assert pieces[0] == b"Be brief." and len(pieces) == 2 and salt == "team"
    pieces, _ = pieces_of("/v1/responses", json.dumps({"input": "Hi", "instructions": "Be brief."}).encode())
    assert pieces == (b"Be brief.", b"Hi")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"[" * 100_000, b'{"messages": 1e999}', b'"\\ud800"', b"\xff"])
def test_a_body_that_is_wrong_has_no_pieces_or_some_and_raises_nothing(body):
    for path in PROMPTS:
        pieces, salt = pieces_of(path, body)
        assert salt == "" and all(isinstance(piece, bytes) for piece in pieces)


def test_a_path_without_prompts_has_none():
    assert pieces_of("/v1/models", b'{"prompt": "a"}') == ((), "")
    assert pieces_of("/v1/completions", b'{"prompt": "\\ud800", "cache_salt": 5}') == ((b"\xed\xa0\x80",), "")
