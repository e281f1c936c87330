# SPDX-License-Identifier: Apache-2.0
"""Results as OpenAI objects."""

import json
from dataclasses import replace

from metrale_jax.results import GenerationResult, RequestMetrics, TokenLogprob, Usage
from serving.openai_answer import Label, chat_completion, text_completion

LOGPROBS = (TokenLogprob(1, -0.5, ((1, -0.5), (2, -1.5))), TokenLogprob(3, float("-inf"), ()))
RESULT = GenerationResult("aé", (1, 3), LOGPROBS, "length", Usage(7, 4, 2), RequestMetrics(0, 0, 0, 0), 5, others=())
LABEL = Label("x-1", 99, "m", {1: b"a", 2: b"b", 3: "é".encode()}.get)


def test_a_chat_completion_has_openais_shape():
    other = replace(RESULT, text="b", logprobs=(), finish_reason="stop")
    assert chat_completion(replace(RESULT, others=(other,)), LABEL) == {
        "id": "x-1",
        "object": "chat.completion",
        "created": 99,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "aé", "refusal": None},
                "logprobs": {
                    "content": [
                        {
                            "token": "a",
                            "logprob": -0.5,
                            "bytes": [97],
                            "top_logprobs": [
                                {"token": "a", "logprob": -0.5, "bytes": [97]},
                                {"token": "b", "logprob": -1.5, "bytes": [98]},
                            ],
                        },
                        {"token": "é", "logprob": -9999.0, "bytes": [195, 169], "top_logprobs": []},
                    ]
                },
                "finish_reason": "length",
            },
            {
                "index": 1,
                "message": {"role": "assistant", "content": "b", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            },
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 4,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }


def test_a_text_completion_lists_tokens_in_columns():
    body = text_completion(RESULT, LABEL)
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "aé",
            "logprobs": {
                "tokens": ["a", "é"],
                "token_logprobs": [-0.5, -9999.0],
                "top_logprobs": [{"a": -0.5, "b": -1.5}, {"é": -9999.0}],
                "text_offset": [0, 1],
            },
            "finish_reason": "length",
        }
    ]
    json.dumps(body, allow_nan=False)
