# SPDX-License-Identifier: Apache-2.0
"""Requests as calls, and what is wrong with one by its place."""

import math

import pytest
from google.protobuf.struct_pb2 import Struct

from metrale_jax.sampling.params import SamplingParams
from serving.core.calls import BranchCall, CallInfo, Prompt
from serving.core.errors import Kind, ServiceError
from serving.grpc import conversion_calls as calls
from serving.grpc.stubs import generate_pb2 as pb

INFO = CallInfo("m", "r", "Test", 3.0)
TEXT = pb.Prompt(text="hello")


def struct(**fields) -> Struct:
    made = Struct()
    made.update(fields)
    return made


def test_a_text_keeps_its_special_tokens_unless_told():
    assert calls.prompt_of(TEXT, "prompt") == Prompt(text="hello", add_special_tokens=True)
    bare = pb.Prompt(text="hello", add_special_tokens=False)
    assert calls.prompt_of(bare, "prompt") == Prompt(text="hello", add_special_tokens=False)


def test_token_ids_are_taken_as_they_are():
    given = pb.Prompt(token_ids=pb.TokenIds(ids=[1, 2**31 - 1]))
    assert calls.prompt_of(given, "prompt").token_ids == (1, 2**31 - 1)


def test_a_chat_keeps_names_extras_and_variables():
    messages = [
        pb.Message(role="user", content="hi", name="ann", extra=struct(count=3, half=0.5, deep={"a": [1, None, True]})),
        pb.Message(role="assistant"),
    ]
    given = pb.Prompt(chat=pb.Chat(messages=messages, add_generation_prompt=False, template=struct(thinking=False)))
    prompt = calls.prompt_of(given, "prompt")
    assert prompt.messages[0] == {
        "role": "user",
        "content": "hi",
        "name": "ann",
        "count": 3,
        "half": 0.5,
        "deep": {"a": [1, None, True]},
    }
    assert prompt.messages[1] == {"role": "assistant", "content": ""}
    assert prompt.template == {"thinking": False, "add_generation_prompt": False}
    assert isinstance(prompt.messages[0]["count"], int), "a template would write 3.0"


def test_a_chat_leaves_the_turn_to_the_template_where_nothing_is_said():
    given = pb.Prompt(chat=pb.Chat(messages=[pb.Message(role="user", content="hi")]))
    assert calls.prompt_of(given, "prompt").template == {}


def test_a_fork_has_a_call_for_each_branch():
    branches = [
        pb.Branch(continuation=pb.Prompt(text=" a"), params=pb.SamplingParams(temperature=0)),
        pb.Branch(),
        pb.Branch(continuation=pb.Prompt(text="")),
        pb.Branch(continuation=pb.Prompt(token_ids=pb.TokenIds(ids=[5]))),
    ]
    call = calls.fork_call(pb.ForkRequest(prompt=TEXT, branches=branches), INFO)
    assert call.info is INFO
    assert call.branches == (
        BranchCall(SamplingParams(temperature=0.0), Prompt(text=" a", add_special_tokens=False)),
        BranchCall(SamplingParams(), None),
        BranchCall(SamplingParams(), None),
        BranchCall(SamplingParams(), Prompt(token_ids=(5,), add_special_tokens=False)),
    )


def test_scores_are_asked_for_with_all_that_was_said():
    request = pb.ScoreRequest(prompt=TEXT, continuations=[pb.Prompt(text=" a")], num_top=3, cache_salt="s")
    call = calls.score_call(request, INFO)
    assert (call.prompt.text, call.num_top, call.cache_salt, call.info) == ("hello", 3, "s", INFO)
    assert call.continuations == (Prompt(text=" a", add_special_tokens=False),)


def test_vectors_are_means_of_length_one_unless_told():
    call = calls.embed_call(pb.EmbedRequest(inputs=[TEXT]), INFO)
    assert (call.pooling, call.normalize) == ("mean", True)
    call = calls.embed_call(pb.EmbedRequest(inputs=[TEXT], pooling=pb.POOLING_LAST, normalize=False), INFO)
    assert (call.pooling, call.normalize) == ("last", False)


def test_an_empty_text_can_be_tokenised():
    assert calls.tokenize_call(pb.TokenizeRequest(prompt=pb.Prompt(text="")), INFO).prompt.text == ""


def generate(**fields):
    return lambda: calls.generate_call(pb.GenerateRequest(**fields), INFO)


def chat(*messages, **fields):
    return generate(prompt=pb.Prompt(chat=pb.Chat(messages=messages, **fields)))


def fork(*branches, prompt=TEXT):
    return lambda: calls.fork_call(pb.ForkRequest(prompt=prompt, branches=branches), INFO)


USER = pb.Message(role="user", content="hi")
IN_CHAT = pb.Prompt(chat=pb.Chat(messages=[USER]))
WRONG = [
    ("prompt", generate()),
    ("prompt", generate(prompt=pb.Prompt())),
    ("prompt", generate(prompt=pb.Prompt(text=""))),
    ("prompt", generate(prompt=pb.Prompt(token_ids=pb.TokenIds()))),
    ("prompt.token_ids.ids", generate(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[1, 2**31])))),
    ("prompt.chat.messages", chat()),
    ("prompt.chat.messages[1].role", chat(USER, pb.Message(content="hi"))),
    ("prompt.chat.messages[0].extra", chat(pb.Message(role="user", extra=struct(role="system")))),
    ("prompt.chat.template.x[1]", chat(USER, template=struct(x=[1, math.inf]))),
    ("params.n", generate(prompt=TEXT, params=pb.SamplingParams(n=0))),
    ("branches", fork()),
    ("branches[1].params.n", fork(pb.Branch(), pb.Branch(params=pb.SamplingParams(n=2)))),
    ("branches[0].params.top_p", fork(pb.Branch(params=pb.SamplingParams(top_p=2)))),
    ("branches[0].continuation.chat", fork(pb.Branch(continuation=IN_CHAT))),
    ("branches[0].continuation", fork(pb.Branch(continuation=pb.Prompt()))),
    ("prompt", fork(pb.Branch(), prompt=pb.Prompt())),
    ("num_top", lambda: calls.score_call(pb.ScoreRequest(prompt=TEXT, num_top=21), INFO)),
    ("continuations[0]", lambda: calls.score_call(pb.ScoreRequest(prompt=TEXT, continuations=[pb.Prompt()]), INFO)),
    ("inputs", lambda: calls.embed_call(pb.EmbedRequest(), INFO)),
    ("inputs[1]", lambda: calls.embed_call(pb.EmbedRequest(inputs=[TEXT, pb.Prompt()]), INFO)),
    ("pooling", lambda: calls.embed_call(pb.EmbedRequest(inputs=[TEXT], pooling=8), INFO)),
    ("token_ids", lambda: calls.detokenize_call(pb.DetokenizeRequest(token_ids=[2**31]), INFO)),
    (
        "prompt.token_ids",
        lambda: calls.tokenize_call(pb.TokenizeRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[1]))), INFO),
    ),
]


@pytest.mark.parametrize(
    ("field", "convert"), WRONG, ids=[f"{place}-{field}" for place, (field, _) in enumerate(WRONG)]
)
def test_what_is_wrong_is_named_by_its_place(field, convert):
    with pytest.raises(ServiceError) as caught:
        convert()
    assert (caught.value.kind, caught.value.field) == (Kind.INVALID, field)
    assert field in str(caught.value) or field.rpartition(".")[2] in str(caught.value)
