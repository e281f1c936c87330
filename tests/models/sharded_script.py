# SPDX-License-Identifier: Apache-2.0
"""Run by `test_sharded.py` in a process with eight CPU devices: what devices share is what one computes alone.

Prints `ok` and the name of each case that held.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from metrale_jax import LLM, SamplingParams
from metrale_jax.aot.collectives import Intended, collectives
from metrale_jax.aot.module_text import parse_module
from metrale_jax.evaluation import chunked_logits
from metrale_jax.generate import generate_tokens
from metrale_jax.loading import read_config
from metrale_jax.probing import AddVectors, with_edit
from metrale_jax.runtime import load_model

GOLDENS = Path(__file__).parent.parent / "goldens"
GREEDY = SamplingParams(temperature=0, max_tokens=6)
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, top_k=20, max_tokens=6)
TOLERANCE = 1e-4
# Vocabulary, heads and channels that eight devices can share, for what the stored models do not have.
SHAREABLE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "head_dim": 8,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
CASES = {
    "gemma2": ((2, 4), {}),
    "gemma3": ((2,), {}),
    "qwen2-window": ((4,), {}),
    "granite-bias": ((2,), {}),
    "phi3-longrope": ((2,), {}),
    "olmo2 heads": ((4, 8), {"architectures": ["Olmo2ForCausalLM"], "num_key_value_heads": 4, "hidden_size": 64}),
    "qwen3 vocabulary": ((8,), {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 8}),
    "llama tied": (
        (8,),
        {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
}


def random_checkpoint(directory, changes):
    """A checkpoint of small random weights."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({**SHAREABLE, **changes}))
    family, raw = read_config(directory)
    rng = np.random.default_rng(0)
    sources = [s for spec in jax.tree.leaves(family.describe(raw).specs) for s in spec.sources]
    save_file(
        {s.name: rng.normal(0, 0.3, s.shape).astype(np.float32) + (len(s.shape) == 1) for s in sources},
        directory / "model.safetensors",
    )
    return directory


def prompt_of(path):
    stored = path / "golden.npz"
    return np.load(stored)["prompt"][:33] if stored.exists() else np.arange(3, 36, dtype=np.int32)


def answers(loaded, prompt):
    logits = np.concatenate(list(chunked_logits(loaded.steps, loaded.params, prompt)))
    tokens = [generate_tokens(loaded.steps, loaded.params, prompt, params, seed=5) for params in (GREEDY, DRAWN)]
    return logits, tokens


def check(path, sizes):
    prompt = prompt_of(path)
    alone, alone_tokens = answers(load_model(str(path)), prompt)
    for size in sizes:
        shared = load_model(str(path), device=jax.devices()[:size])
        logits, tokens = answers(shared, prompt)
        np.testing.assert_allclose(logits, alone, rtol=0, atol=TOLERANCE)
        assert tokens == alone_tokens, (size, tokens, alone_tokens)
        check_shares(shared, size)
        check_collectives(shared)


def check_shares(loaded, size):
    layer = loaded.params.layers[0]
    for weight in (layer.mixers[0].qkv.weight, layer.mixers[0].out.weight, layer.mlp.gate_up.weight):
        assert weight.addressable_shards[0].data.size * size == weight.size
    pool = jax.tree.leaves(loaded.steps.make_pool((3,) * len(loaded.model.layout.groups)))
    assert all(leaf.addressable_shards[0].data.size * size == leaf.size for leaf in pool)


def check_collectives(loaded):
    """The sums of each step and no more, where a device must not get the whole of a weight or of the pool."""
    config = loaded.config
    held = jax.tree.leaves(loaded.params)
    whole = frozenset(tuple(sorted(leaf.shape)) for leaf in held if leaf.ndim > 1)
    shared_embedding = not loaded.params.embed.sharding.is_fully_replicated
    programs = {key: p for key, p in loaded.steps.programs().items() if key.startswith("('decode'")}
    assert programs
    for program in programs.values():
        found = list(collectives(parse_module(program.as_text())))
        intended = Intended(1, len(config.layers), config.hidden_dim, whole, shared_embedding, config.vocab_size)
        assert not intended.problems(found), intended.problems(found)


def check_edit(path, size):
    """A vector added between layers is the same on every device."""
    found = []
    for device in (None, jax.devices()[:size]):
        loaded = load_model(str(path), device=device)
        vector = np.linspace(-2, 2, loaded.config.hidden_dim, dtype=np.float32)
        steps, params = with_edit(loaded.steps, AddVectors((1,))), loaded.params.replace(edits=(vector,))
        found.append(np.concatenate(list(chunked_logits(steps, params, prompt_of(path)[:8]))))
    np.testing.assert_allclose(*found, rtol=0, atol=TOLERANCE)


def check_engine(path):
    """A batch through the engine, prompts that fork among them."""
    prompts = [prompt_of(path)[:length].tolist() for length in (33, 20, 5, 33)]
    params = [replace(GREEDY, seed=7), replace(DRAWN, seed=7, n=2, repetition_penalty=1.1), GREEDY, GREEDY]
    results = []
    for count in (1, 4):
        llm = LLM(path, max_sequences=4, max_context_tokens=128, prefill_tokens=32, tensor_parallel=count)
        found = llm.generate(prompts, params)
        results.append([[list(choice.token_ids) for choice in result.choices] for result in found])
        llm.engine.check()
    assert results[0] == results[1], results


if __name__ == "__main__":
    directory, *names = sys.argv[1:]
    for name in names:
        sizes, changes = CASES[name]
        path = random_checkpoint(Path(directory) / name.replace(" ", "-"), changes) if changes else GOLDENS / name
        check(path, sizes)
        if name == "qwen2-window":
            check_engine(path)
        if name == "llama tied":
            check_edit(path, sizes[-1])
        print("ok", name, flush=True)
