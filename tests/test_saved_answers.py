# SPDX-License-Identifier: Apache-2.0
"""Answers that are put aside, on the host or in a file, and carried on bit for bit."""

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from metrale_jax import LLM, SamplingParams
from metrale_jax.core.errors import ConfigError, RequestError
from metrale_jax.engine.saved_file import read_saved, write_saved
from tests.conftest import GOLDENS

OPTIONS = {"max_sequences": 4, "max_context_tokens": 128, "kv_cache_mib": 1, "prefill_tokens": 32}
PROMPT = list(range(3, 40))
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=30, logprobs=2, repetition_penalty=1.2)
MODELS = ("llama-default", "gemma2")


@pytest.fixture(scope="module")
def loaded():
    made = {}

    def load(name, **options):
        key = name, *sorted(options.items())
        if key not in made:
            made[key] = LLM(GOLDENS / name, **OPTIONS | options)
        return made[key]

    return load


def finished(llm, answer):
    while llm.step():
        pass
    return answer.result()


def saved_after(llm, path, num_tokens, params=SAMPLED, prompt=PROMPT):
    answer = llm.submit(prompt, params)
    while answer.num_generated < num_tokens:
        llm.step()
    assert llm.save_answer(answer, path) == path.stat().st_size
    return answer


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_tokens", [0, 1, 13])
def test_a_saved_answer_goes_on_as_it_would_have(name, num_tokens, loaded, tmp_path):
    llm = loaded(name)
    answer = saved_after(llm, tmp_path / "state", num_tokens)
    whole = finished(llm, answer)
    again = llm.load_answer(tmp_path / "state")
    assert again.num_generated >= num_tokens
    result = finished(llm, again)
    assert (result.token_ids, result.logprobs) == (whole.token_ids, whole.logprobs)
    assert result.finish_reason == whole.finish_reason and result.seed == 5
    assert llm.generate([PROMPT], SAMPLED)[0].token_ids == whole.token_ids


def test_an_answer_that_was_loaded_and_not_run_is_saved_whole(loaded, tmp_path):
    llm = loaded("llama-default")
    whole = finished(llm, saved_after(llm, tmp_path / "state", 9))
    answer = llm.load_answer(tmp_path / "state")
    llm.save_answer(answer, tmp_path / "again")
    facts, arrays = read_saved(tmp_path / "again")
    assert facts == read_saved(tmp_path / "state")[0] and len(arrays) == len(read_saved(tmp_path / "state")[1]) > 0
    assert facts["state"]["seq_len"] >= len(PROMPT) + 8
    for one in (answer, llm.load_answer(tmp_path / "again")):
        assert finished(llm, one).token_ids == whole.token_ids


def test_another_process_carries_on(loaded, tmp_path):
    llm = loaded("gemma2")
    whole = finished(llm, saved_after(llm, tmp_path / "state", 9))
    script = (
        "from metrale_jax import LLM\n"
        f"llm = LLM({str(GOLDENS / 'gemma2')!r}, **{OPTIONS!r})\n"
        f"answer = llm.load_answer({str(tmp_path / 'state')!r})\n"
        "while llm.step():\n    pass\n"
        "print(list(answer.result().token_ids), llm.stats().prompt_tokens)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == f"{list(whole.token_ids)} 0", "the prompt is not run again"


def test_structure_and_stop_strings_go_on_where_they_stood(loaded, tmp_path):
    llm = loaded("llama-default")
    params = SamplingParams(max_tokens=20, seed=3, bad_words=[[7, 8], [9, 10, 11]])
    whole = finished(llm, saved_after(llm, tmp_path / "state", 6, params))
    assert finished(llm, llm.load_answer(tmp_path / "state")).token_ids == whole.token_ids


def test_an_answer_in_another_format_of_keys_goes_on(loaded, tmp_path):
    llm = loaded("llama-default", kv_dtype="int8")
    whole = finished(llm, saved_after(llm, tmp_path / "state", 6))
    assert finished(llm, llm.load_answer(tmp_path / "state")).token_ids == whole.token_ids


def test_what_cannot_be_saved_says_why(loaded, tmp_path):
    llm = loaded("llama-default")
    answer = llm.submit(PROMPT, SamplingParams(max_tokens=2, seed=1))
    several = llm.submit(PROMPT, SamplingParams(max_tokens=2, n=2, seed=1))
    with pytest.raises(ConfigError, match="cannot be written"):
        llm.save_answer(answer, tmp_path / "nowhere" / "state")
    with pytest.raises(RequestError, match="2 answers are not one"):
        llm.save_answer(several, tmp_path / "state")
    searching = llm.submit(PROMPT, SamplingParams(max_tokens=2, beam_width=2))
    with pytest.raises(RequestError, match=r"beam_width=2 is a beam search.*\(beam_width=0\)"):
        llm.save_answer(searching, tmp_path / "state")
    for none in ("x", None, answer.only):
        with pytest.raises(RequestError, match="is no answer; give what submit or load_answer returned"):
            llm.save_answer(none, tmp_path / "state")
    with pytest.raises(RequestError, match="is not this LLM's"):
        loaded("gemma2").save_answer(answer, tmp_path / "state")
    finished(llm, answer)
    with pytest.raises(RequestError, match="has ended"):
        llm.save_answer(answer, tmp_path / "state")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name, options, told",
    [("gemma2", {}, "family"), ("llama-default", {"block_size": 32}, "state"), ("llama-untied-bias", {}, "config")],
)
def test_a_state_of_another_model_is_refused(name, options, told, loaded, tmp_path):
    finished(loaded("llama-default"), saved_after(loaded("llama-default"), tmp_path / "state", 3))
    with pytest.raises(ConfigError, match=f"of another model: its {told} is"):
        loaded(name, **options).load_answer(tmp_path / "state")


def test_equal_models_with_other_weights_are_told_apart(loaded, tmp_path):
    llm = loaded("llama-default")
    finished(llm, saved_after(llm, tmp_path / "state", 3))
    other = tmp_path / "model"
    other.mkdir()
    for file in (GOLDENS / "llama-default").iterdir():
        if file.suffix != ".safetensors":
            (other / file.name).write_bytes(file.read_bytes())
    with safe_open(GOLDENS / "llama-default" / "model.safetensors", "numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * np.float32(1.01)
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(ConfigError, match="its weights is"):
        LLM(other, **OPTIONS).load_answer(tmp_path / "state")


def test_a_damaged_file_is_refused(loaded, tmp_path):
    llm = loaded("llama-default")
    finished(llm, saved_after(llm, tmp_path / "state", 3))
    whole = (tmp_path / "state").read_bytes()
    for damaged in (b"", b"\0" * 40, whole[: len(whole) // 2], whole[:-1]):
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(ConfigError, match="is not what was saved|cannot be read"):
            llm.load_answer(tmp_path / "damaged")
    with pytest.raises(ConfigError, match="cannot be read"):
        llm.load_answer(tmp_path / "none")
    save_file({"a": np.zeros(3)}, tmp_path / "other")
    with pytest.raises(ConfigError, match="is not what was saved"):
        llm.load_answer(tmp_path / "other")
    for place in range(100, len(whole), len(whole) // 7):
        flipped = bytearray(whole)
        flipped[place] ^= 4
        (tmp_path / "damaged").write_bytes(flipped)
        with pytest.raises(ConfigError, match="is not what was saved|another model"):
            llm.load_answer(tmp_path / "damaged")
    for name in (None, "", "a\0b", 5):
        with pytest.raises(ConfigError, match="path .* is none"):
            llm.load_answer(name)


CHANGES = (
    {"params": {"n": 0}},
    {"params": {"max_tokens": 2}},
    {"output": None},
    {"output": [9999, 3, 3]},
    {"output": [-3, 3, 3]},
    {"output": ["a", 3, 3]},
    {"output": [3, 3]},
    {"logprobs": []},
    {"seed": None},
    {"cached_tokens": "many"},
    {"cached_tokens": 10**9},
    {"model": []},
    {"prompt": [1e9]},
    {"prompt": [3, 4]},
    {"state": {"seq_len": 3}},
    {"state": {"seq_len": "9", "known_len": 37, "held": [[0]]}},
    {"state": {"seq_len": 10**6, "known_len": 37, "held": [[0, 1, 2]]}},
    {"state": {"seq_len": 39, "known_len": 37, "held": [[0, 1, 99]]}},
    {"state": {"seq_len": 39, "known_len": 37, "held": [[-1, -1, -1]]}},
    {"state": {"seq_len": 39, "known_len": 37, "held": [["a"]]}},
    {"state": {"seq_len": 39, "known_len": 37, "held": []}},
)


@pytest.mark.parametrize("change", CHANGES, ids=[json.dumps(change)[:60] for change in CHANGES])
def test_a_header_that_does_not_hold_together_is_refused_before_anything_runs(change, loaded, tmp_path):
    llm = loaded("llama-default")
    finished(llm, saved_after(llm, tmp_path / "state", 3))
    header, arrays = read_saved(tmp_path / "state")
    assert header["state"]["seq_len"] == len(PROMPT) + len(header["output"]) - 1 >= 39
    write_saved(tmp_path / "changed", header | change, arrays)
    with pytest.raises((ConfigError, RequestError)):
        llm.load_answer(tmp_path / "changed")
    assert not llm.step(), "nothing of it is left in the engine"


@pytest.mark.parametrize("where", ["memory", "files", "both", "full disk", "damaged files"])
def test_swapped_answers_are_those_that_ran_alone(where, loaded, tmp_path, monkeypatch, caplog):
    name = "gemma2" if where in ("memory", "both") else "llama-default"
    places = {"memory": {"swap_mib": 8}, "both": {"swap_mib": 0, "swap_dir": tmp_path}}
    narrow = LLM(GOLDENS / name, **OPTIONS | places.get(where, {"swap_dir": tmp_path}))
    if where == "full disk":
        monkeypatch.setattr("metrale_jax.engine.saved.write_saved", refused)
    if where == "damaged files":
        monkeypatch.setattr("metrale_jax.engine.saved.read_saved", lambda path: ({}, [np.zeros(3)]))
    prompts = [[3 + (i * 7 + j) % 100 for j in range(30 + i)] for i in range(6)]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=40, ignore_eos=True) for i in range(6)]
    memory = narrow.engine.memory
    spare = [allocator.allocate(allocator.num_free - 13) for allocator in memory.allocators]
    results = narrow.generate(prompts, params)
    for allocator, blocks in zip(memory.allocators, spare, strict=True):
        allocator.release(blocks)
    stats = narrow.stats()
    assert stats.num_preemptions > 0 and stats.swapped_bytes == 0
    assert stats.num_swaps == (0 if where == "full disk" else stats.num_preemptions)
    assert ("run again" in caplog.text) == (where == "full disk")
    assert not list(tmp_path.rglob("*.safetensors")), "what came back leaves no file"
    assert sum(result.metrics.num_preemptions for result in results) == stats.num_preemptions
    for prompt, one, result in zip(prompts, params, results, strict=True):
        assert result.token_ids == loaded(name).generate([prompt], one)[0].token_ids


def refused(path, header, arrays):
    raise ConfigError(f"state file {str(path)!r} cannot be written (no space); name another file.")


def test_a_swap_directory_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"swap directory .*file"):
        LLM(GOLDENS / "llama-default", **OPTIONS, swap_dir=tmp_path / "file")
