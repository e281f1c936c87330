# SPDX-License-Identifier: Apache-2.0
"""The door: real checkpoints through `LLM`, against transformers on the same dequantised weights."""

import json
import math
import re
import threading

import numpy as np
import pytest

from metrale_jax import LLM, SamplingParams
from metrale_jax.core.errors import ConfigError, MetraleError, ModelNotFoundError, RequestError, TextError
from metrale_jax.generate import generate_tokens
from tests.conftest import GOLDENS

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


def stored(name):
    return json.loads((GOLDENS / "gguf" / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def smollm2():
    # Few sizes of steps, since each has thirty layers to compile; longer lists and prompts take turns and are cut.
    return LLM("smollm2-135m", max_sequences=4, max_context_tokens=1024, prefill_tokens=64)


@pytest.fixture(scope="module")
def tiny():
    """A model without a tokenizer."""
    return LLM(GOLDENS / "llama-default", max_context_tokens=256, max_sequences=4)


def held_to_transformers(llm, name):
    data = stored(name)
    results = llm.generate([prompt["ids"] for prompt in data["prompts"]], GREEDY)
    for prompt, result in zip(data["prompts"], results, strict=True):
        assert list(result.token_ids) == prompt["greedy"], prompt["text"]
    perplexity = llm.perplexity(data["perplexity"]["ids"])
    assert abs(perplexity / data["perplexity"]["perplexity"] - 1) < 1e-3
    llm.engine.check()


def test_smollm2_continues_ten_prompts_as_transformers_does(smollm2):
    held_to_transformers(smollm2, "smollm2-135m-q4_1")


def test_the_engine_is_watched_through_the_door(tiny, tmp_path, monkeypatch):
    tiny.generate([[3]], SamplingParams(max_tokens=2, ignore_eos=True))  # what a load leaves compiling is there then
    before, seen = tiny.stats(), []
    monkeypatch.setattr(tiny, "_progress", lambda *stage: seen.append(stage))
    with tiny.profile(tmp_path / "profile"):
        with pytest.raises(ConfigError, match="is being profiled; end that profile first"), tiny.profile(tmp_path):
            pass
        # No other test of this model meets so long a prompt beside rules of such kinds.
        result = tiny.generate([[3] * 70], SamplingParams(max_tokens=3, logprobs=1, top_k=5, ignore_eos=True))[0]
    after = tiny.stats()
    assert result.usage.generated_tokens == after.generated_tokens - before.generated_tokens == 3
    assert after.prompt_tokens - before.prompt_tokens == 70
    assert any(path.is_file() for path in (tmp_path / "profile").glob("**/*.xplane.pb"))
    late = [stage for stage in seen if stage[0].startswith("compile ")]
    assert len(late) == 2 * (after.num_compiles - before.num_compiles) > 0
    assert late[0][1:] == (0, 1) and late[1] == (late[0][0], 1, 1)
    with pytest.raises(ConfigError, match="profile directory '/dev/null/x' cannot be written"):
        tiny.profile("/dev/null/x").__enter__()


@pytest.mark.slow
def test_gemma3_continues_ten_prompts_as_transformers_does():
    held_to_transformers(LLM("gemma3-270m", max_sequences=16, max_context_tokens=1024), "gemma3-270m-q4_k_m")


def test_prompts_come_back_in_order_whatever_their_kind(smollm2):
    text = "The capital of France is"
    ids = smollm2.tokenizer.encode(text)
    params = SamplingParams(temperature=0, max_tokens=8)
    results = smollm2.generate([text, ids, "Water boils at"], params)
    assert results[0].token_ids == results[1].token_ids != results[2].token_ids
    assert "Paris" in results[0].text
    assert results[0].usage.prompt_tokens == len(ids)
    assert results[0].usage.generated_tokens == len(results[0].token_ids) == 8
    assert results[0].finish_reason == "length"
    metrics = results[0].metrics
    assert 0 <= metrics.queued_s <= metrics.first_token_s <= metrics.finished_s


def test_a_stream_joins_to_the_text_and_to_decoding_all_ids_at_once(smollm2):
    prompt = "Translate to Chinese and add emoji: good morning, dear friend ☀️. 早"
    for seed in range(3):
        params = SamplingParams(temperature=1.2, seed=seed, max_tokens=48)
        pieces = list(smollm2.stream(prompt, params))
        result = pieces[-1].result
        assert "".join(pieces) == result.text
        ended = result.token_ids[:-1] if result.finish_reason == "stop" else result.token_ids
        assert result.text == smollm2.tokenizer.decode(list(ended))
        assert sum((piece.token_ids for piece in pieces), ()) == result.token_ids
        assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])
        assert result.token_ids == smollm2.generate(prompt, params)[0].token_ids


def test_chat_stops_at_the_end_of_the_turn(smollm2):
    messages = [{"role": "user", "content": "What is the capital of Germany? Answer in one sentence."}]
    result = smollm2.chat(messages, SamplingParams(temperature=0, max_tokens=64))
    assert result.finish_reason == "stop"
    assert "Berlin" in result.text and "<|im_end|>" not in result.text


def test_stop_strings_cut_the_text_even_across_tokens(smollm2):
    base = smollm2.generate("One, two, three,", SamplingParams(temperature=0, max_tokens=24))[0]
    middle = base.text[len(base.text) // 2 :][:5]
    params = SamplingParams(temperature=0, max_tokens=24, stop=[middle])
    result = smollm2.generate("One, two, three,", params)[0]
    assert result.finish_reason == "stop"
    assert result.text == base.text[: base.text.index(middle)]
    assert "".join(smollm2.stream("One, two, three,", params)) == result.text
    kept = SamplingParams(temperature=0, max_tokens=24, stop=middle, include_stop_str_in_output=True)
    assert smollm2.generate("One, two, three,", kept)[0].text == result.text + middle


def test_log_probabilities_are_those_of_the_raw_logits(smollm2):
    prompt = smollm2.tokenizer.encode("The capital of France is Paris, and the capital of Italy is Rome. The sky is")
    params = SamplingParams(temperature=0.7, top_k=40, seed=1, max_tokens=4, logprobs=3)
    result = smollm2.generate([prompt], params)[0]
    logits = smollm2.logits([*prompt, *result.token_ids]).astype(np.float64)
    for index, entry in enumerate(result.logprobs):
        row = logits[len(prompt) - 1 + index]
        expected = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        assert abs(entry.logprob - expected[entry.token_id]) < 1e-3
        assert [token for token, _ in entry.top] == np.argsort(-row)[:3].tolist()
        assert entry.token_id == result.token_ids[index]


def test_n_answers_differ_and_are_each_reproducible(smollm2):
    params = SamplingParams(n=3, temperature=1.0, seed=11, max_tokens=12)
    first, second = (smollm2.generate("Once upon a time", params)[0] for _ in range(2))
    assert [choice.token_ids for choice in first.choices] == [choice.token_ids for choice in second.choices]
    assert len({choice.token_ids for choice in first.choices}) == 3
    lone = smollm2.generate("Once upon a time", SamplingParams(temperature=1.0, seed=11, max_tokens=12))[0]
    assert lone.token_ids == first.token_ids


def test_a_request_without_a_seed_says_which_seed_repeats_it(smollm2):
    params = SamplingParams(temperature=1.0, max_tokens=8)
    first, second = (smollm2.generate("A poem:", params)[0] for _ in range(2))
    assert first.seed != second.seed
    again = smollm2.generate("A poem:", SamplingParams(temperature=1.0, max_tokens=8, seed=first.seed))[0]
    assert again.token_ids == first.token_ids


def test_a_batch_gives_each_prompt_its_solo_answer(smollm2):
    prompts = [f"Fact number {i} about {topic}:" for i, topic in enumerate(["cats", "the sea", "iron", "tea", "maps"])]
    encoded = [smollm2.tokenizer.encode(prompt) for prompt in prompts]
    for params in (GREEDY, SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=32, ignore_eos=True)):
        results = smollm2.generate(encoded, params)
        solo = generate_tokens(smollm2.loaded.steps, smollm2.loaded.params, encoded[2], params, results[2].seed)
        assert list(results[2].token_ids) == solo


def test_threads_share_one_model(smollm2):
    answers = {}

    def ask(name):
        answers[name] = smollm2.generate(name, SamplingParams(temperature=0, max_tokens=10))[0].token_ids

    names = ["Red is", "Blue is", "Green is"]
    threads = [threading.Thread(target=ask, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    alone = smollm2.generate(names, SamplingParams(temperature=0, max_tokens=10))
    assert [answers[name] for name in names] == [result.token_ids for result in alone]


def test_closing_a_stream_gives_its_blocks_back(smollm2):
    stream = smollm2.stream("Count to a thousand:", SamplingParams(temperature=0, max_tokens=200))
    next(stream)
    stream.close()
    while smollm2.engine.step():
        pass
    smollm2.engine.check()


@pytest.mark.parametrize(
    "prompt, words",
    [
        ([[]], "prompt of 0 tokens"),
        ([[1, 9999]], "token id 9999"),
        ([[-1]], "token id -1"),
        ([[1.5]], "1.5"),
        ([list(range(100)) * 3], "prompt of 300 tokens leaves no room in a context of 256"),
        ([b"x"], "a bytes; give a text or a list of token ids"),
        ([{"role": "user"}], "a dict; give a text or a list of token ids"),
        ("text", "tokenizer"),
    ],
)
def test_a_bad_prompt_alone_raises_and_names_the_remedy(tiny, prompt, words):
    with pytest.raises(MetraleError, match=words):
        tiny.generate(prompt, SamplingParams(temperature=0, max_tokens=4))


def test_a_bad_prompt_among_good_ones_harms_only_itself(tiny):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    good = tiny.generate([[3, 4, 5]], params)[0]
    first, bad, last = tiny.generate([[3, 4, 5], [9999], [3, 4, 5]], params)
    assert first.token_ids == last.token_ids == good.token_ids
    assert bad.finish_reason == "error" and isinstance(bad.error, RequestError) and "9999" in str(bad.error)
    tiny.engine.check()


def test_the_longest_answers_of_a_list_run_first_and_come_back_in_order(tiny, monkeypatch):
    submitted, enqueue = [], tiny.engine.enqueue

    def spy(admitted, watches):
        submitted.append(admitted.ask.params.max_tokens)
        return enqueue(admitted, watches)

    monkeypatch.setattr(tiny.engine, "enqueue", spy)
    limits = [2, 5, None, 3]
    params = [SamplingParams(temperature=0, max_tokens=limit, stop_token_ids=list(range(131))) for limit in limits]
    prompts = [[index + 3] * (index + 1) for index in range(4)]
    results = tiny.generate(prompts, params)
    assert submitted == [None, 5, 3, 2]
    assert [result.usage.prompt_tokens for result in results] == [1, 2, 3, 4]


def test_a_model_without_a_tokenizer_serves_token_ids_and_says_so_when_asked_for_text(tiny):
    result = tiny.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=3))[0]
    assert len(result.token_ids) <= 3 and result.text == ""
    with pytest.raises(TextError):
        tiny.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(TextError, match="stop_token_ids"):
        tiny.generate([[3]], SamplingParams(stop=["x"]))


def test_logits_and_perplexity_agree_with_the_golden(tiny, golden):
    data = golden("llama-default").data
    logits = tiny.logits(data["prompt"][:33].tolist())
    np.testing.assert_allclose(logits, data["logits_33"], rtol=0, atol=1e-4)
    rows = data["logits_33"].astype(np.float64)
    total = np.log(np.exp(rows).sum(axis=1))
    losses = total[:-1] - rows[np.arange(32), data["prompt"][1:33]]
    assert math.isclose(tiny.perplexity(data["prompt"][:33].tolist()), math.exp(losses.mean()), rel_tol=1e-4)


def test_unknown_models_and_options_are_named(tmp_path):
    with pytest.raises(ModelNotFoundError, match="no-such-model"):
        LLM("no-such-model")
    with pytest.raises(ConfigError, match="max_seqs"):
        LLM("smollm2-135m", max_seqs=3)
    for option, words in (({"kv_cache_mib": 0}, "kv_cache_mib=0"), ({"block_size": 24}, "block_size=24")):
        with pytest.raises(ConfigError, match=words):
            LLM(GOLDENS / "llama-default", **option)
    with pytest.raises(ConfigError, match="dtype='int3'"):
        LLM(GOLDENS / "llama-default", dtype="int3")
    with pytest.raises(ConfigError, match="max_context_tokens=100000"):
        LLM(GOLDENS / "llama-default", max_context_tokens=100000)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="compile cache"):
        LLM(GOLDENS / "llama-default", compile_cache=tmp_path / "file" / "below")


def test_narrow_dtypes_run(golden):
    prompt = golden("llama-default").prompt[:33].tolist()
    for dtype in ("bfloat16", "float16"):
        llm = LLM(GOLDENS / "llama-default", dtype=dtype, max_context_tokens=64, max_sequences=1)
        difference = np.abs(llm.logits(prompt) - golden("llama-default").data["logits_33"])
        assert 0 < difference.max() < 0.2
        assert (
            len(llm.generate([prompt], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))[0].token_ids) == 3
        )


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer", "maximum": 99}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


def test_answers_keep_to_their_structure_in_any_company(smollm2):
    prompt = "The capital of France is"
    plain = SamplingParams(temperature=0, max_tokens=12)
    params = [
        SamplingParams(temperature=1.0, seed=3, max_tokens=64, json_schema=CITY),
        SamplingParams(temperature=0, max_tokens=32, regex=r"[0-9]{3}-[a-c]{1,3}!"),
        SamplingParams(temperature=2.0, seed=1, max_tokens=32, choice=["yes", "no", "perhaps"]),
        SamplingParams(temperature=0, max_tokens=32, grammar='root ::= "<" [a-z]{4} ">"'),
        plain,
    ]
    together = smollm2.generate([prompt] * 5, params)
    city = json.loads(together[0].text)
    assert set(city) == {"city", "people"} and isinstance(city["people"], int)
    assert re.fullmatch(r"[0-9]{3}-[a-c]{1,3}!", together[1].text)
    assert together[2].text in ("yes", "no", "perhaps")
    assert re.fullmatch("<[a-z]{4}>", together[3].text)
    assert {result.finish_reason for result in together[:4]} == {"stop"}
    for result, one in zip(together, params, strict=True):
        assert result.token_ids == smollm2.generate(prompt, one)[0].token_ids, one
    with pytest.raises(RequestError, match="regex"):
        smollm2.generate(prompt, SamplingParams(regex="(unclosed"))
    with pytest.raises(RequestError, match="^min_tokens=3 cannot be had with a structured answer"):
        smollm2.generate(prompt, SamplingParams(regex="a+", min_tokens=3))


def test_bad_words_never_come_and_penalties_change_the_answer(smollm2):
    prompt = "The capital of France is"
    free = smollm2.generate(prompt, SamplingParams(temperature=0, max_tokens=8))[0]
    assert "Paris" in free.text
    held = smollm2.generate(prompt, SamplingParams(temperature=0, max_tokens=8, bad_words=["Paris"]))[0]
    assert "Paris" not in held.text
    wanted = smollm2.tokenizer.encode(" London", add_special_tokens=False)
    biased = smollm2.generate(prompt, SamplingParams(temperature=0, max_tokens=4, logit_bias={wanted[0]: 100}))[0]
    assert biased.token_ids[:2] == (wanted[0],) * 2
    banned = SamplingParams(temperature=0, max_tokens=8, logit_bias={wanted[0]: 100}, frequency_penalty=2.0)
    assert smollm2.generate(prompt, banned)[0].token_ids[0] == wanted[0]


def test_a_prompt_is_echoed_and_scored_whether_it_was_cached_or_not(smollm2):
    ids = smollm2.tokenizer.encode("The capital of France is Paris, and the capital of Italy is Rome. " * 2)
    scored = SamplingParams(temperature=0, max_tokens=4, echo=True, logprobs=2, prompt_logprobs=2)
    first, second = smollm2.generate(ids, scored)[0], smollm2.generate(ids, scored)[0]
    plain = smollm2.generate(ids, SamplingParams(temperature=0, max_tokens=4))[0]
    assert first.text == second.text == smollm2.tokenizer.decode(ids) + plain.text
    assert "".join(smollm2.stream(ids, scored)) == first.text
    assert plain.usage.cached_tokens == (len(ids) - 1) // 16 * 16
    assert len(first.prompt_logprobs) == len(ids) - 1 and first.prompt_token_ids == tuple(ids)
    logits = smollm2.logits(ids)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for entry, again, row, token in zip(first.prompt_logprobs, second.prompt_logprobs, expected, ids[1:], strict=False):
        assert entry.token_id == token and entry == again
        assert abs(entry.logprob - row[token]) < 1e-3
        assert [value for _, value in entry.top] == pytest.approx(np.sort(row)[::-1][:2].tolist(), abs=1e-3)


def test_beams_come_back_best_first_with_their_scores(tiny, smollm2):
    params = SamplingParams(beam_width=3, n=3, max_tokens=6, ignore_eos=True)
    result = smollm2.generate("The capital of France is", params)[0]
    assert len(result.choices) == 3
    scores = [choice.score for choice in result.choices]
    assert scores == sorted(scores, reverse=True)
    assert len({choice.text for choice in result.choices}) == 3 and "Paris" in result.text
    with pytest.raises(RequestError, match="beam_width=3 cannot share one stream"):
        smollm2.stream("x", params)


def test_answers_of_one_prompt_run_it_once(smollm2):
    ids = smollm2.tokenizer.encode("Completely new words: zebra, quartz, violin, umbrella, nutmeg.")
    before = smollm2.engine.stats().prompt_tokens
    result = smollm2.generate(ids, SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=5, ignore_eos=True))[0]
    assert smollm2.engine.stats().prompt_tokens - before == len(ids)
    assert len({choice.token_ids for choice in result.choices}) > 1
    for choice in result.choices:
        alone = SamplingParams(temperature=1.0, seed=choice.seed, max_tokens=5, ignore_eos=True)
        assert smollm2.generate(ids, alone)[0].token_ids == choice.token_ids


def test_a_stream_that_is_closed_or_forgotten_before_its_first_piece_costs_nobody_anything(tiny):
    long = SamplingParams(temperature=0, max_tokens=200)
    tiny.stream([3, 4, 5], long).close()
    assert not tiny.stats().num_waiting
    for _ in range(5):
        tiny.stream([3, 4, 5], long)
    before = tiny.stats().generated_tokens
    tiny.generate([[6, 7]], SamplingParams(temperature=0, max_tokens=3))
    assert tiny.stats().generated_tokens - before == 3
    tiny.engine.check()


def test_a_failure_while_prompts_are_queued_leaves_none_of_them_behind(tiny, monkeypatch):
    enqueue = tiny.engine.enqueue

    def second_fails(admitted, watches):
        if admitted.prompt == (9,):
            raise KeyboardInterrupt
        return enqueue(admitted, watches)

    monkeypatch.setattr(tiny.engine, "enqueue", second_fails)
    with pytest.raises(KeyboardInterrupt):
        tiny.generate([[3, 4], [9]], SamplingParams(temperature=0, max_tokens=5))
    assert not tiny.stats().num_waiting


def test_every_answer_of_a_prompt_has_its_scores_and_late_beams_are_as_many_as_asked(tiny):
    scored = SamplingParams(n=3, seed=1, max_tokens=2, prompt_logprobs=1)
    choices = tiny.generate([[3, 4, 5, 6]], scored)[0].choices
    assert [len(choice.prompt_logprobs) for choice in choices] == [3, 3, 3]
    late = SamplingParams(beam_width=3, n=3, max_tokens=50, deadline_s=1e-9)
    assert [choice.finish_reason for choice in tiny.generate([[3, 4]], late)[0].choices] == ["abort"] * 3
