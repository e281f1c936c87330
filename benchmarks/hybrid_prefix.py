# SPDX-License-Identifier: Apache-2.0
"""What snapshots of recurrent state save a hybrid model: first tokens behind a shared prefix, and conversations.

    python -m benchmarks.hybrid_prefix --size tiny --size 200m --output results.json

The models are random: what they say means nothing, what they cost is that of a real one.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import machine_facts
from metrale_jax.engine.admission import Ask
from metrale_jax.engine.loop import Engine
from metrale_jax.engine.make import make_engine
from metrale_jax.engine.settings import EngineConfig
from metrale_jax.engine.snapshots import SnapshotPolicy
from metrale_jax.engine.warmup import all_programs, compile_programs
from metrale_jax.models.decoder import make_model
from metrale_jax.models.family import Description
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.models.registry import family_for
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.state.formats import StateFormats
from metrale_jax.steps.build import Steps
from metrale_jax.steps.home import row_major

SHARED, OWN = 1500, 50
CONVERSATIONS, TURNS, SYSTEM, ASKED = 20, 5, 200, 40
SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 512},
    "200m": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "vocab_size": 32000},
}
HEADS = {
    "tiny": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "linear": 16, "linear_heads": (2, 4)},
    "200m": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "linear": 128,
        "linear_heads": (8, 8),
    },
}
POLICIES = {
    "no snapshots": None,
    "chunk ends only": SnapshotPolicy(last_block=False, branches=False, decode_blocks=0, whole_prompts=False),
    "chunk ends, last blocks, branches, decoding": SnapshotPolicy(whole_prompts=False),
    "and whole prompts": SnapshotPolicy(),
}


def description(size: str) -> Description:
    """A Qwen3-Next of three layers of the gated delta rule to one of attention, dense."""
    heads = HEADS[size]
    count = SIZES[size]["num_hidden_layers"]
    values = SIZES[size] | {
        "architectures": ["Qwen3NextForCausalLM"],
        "num_attention_heads": heads["num_attention_heads"],
        "num_key_value_heads": heads["num_key_value_heads"],
        "head_dim": heads["head_dim"],
        "linear_key_head_dim": heads["linear"],
        "linear_value_head_dim": heads["linear"],
        "linear_num_key_heads": heads["linear_heads"][0],
        "linear_num_value_heads": heads["linear_heads"][1],
        "mlp_only_layers": list(range(count)),
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    }
    family = family_for("Qwen3NextForCausalLM")
    return family.describe(RawConfig(values, family.defaults, f"random model of size {size}"))


def random_params(described: Description, seed: int):
    """Weights of about the size that training leaves them, float32."""
    keys = iter(jax.random.split(jax.random.key(seed), 4096))

    def weight(spec):
        if len(spec.shape) == 1:
            return jnp.ones(spec.shape, jnp.float32) * 0.5
        return jax.random.normal(next(keys), spec.shape, jnp.float32) * spec.shape[-1] ** -0.5

    return jax.tree.map(weight, described.specs)


def num_parameters(params) -> int:
    """Numbers in all weights."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


class Bench:
    """One model, compiled once for every policy."""

    def __init__(self, size: str):
        described = description(size)
        self.params = random_params(described, 0)
        formats = StateFormats("float32", "float32")
        self.steps = Steps(make_model(described.config, "cpu", 16, formats), row_major(jax.devices()[0]))
        self.config = EngineConfig(
            max_sequences=8,
            max_context_tokens=2048,
            kv_cache_bytes=512 << 20,
            prefill_tokens=512,
            mixed_steps=False,
            step_tokens=16,
            num_snapshots=128,
        )

    def engine(self, policy: SnapshotPolicy | None) -> Engine:
        """A fresh engine, all of whose programs are compiled. Without a policy nothing is ever found."""
        none = SnapshotPolicy(False, False, False, 0, whole_prompts=False)
        config = replace(self.config, snapshot_policy=policy or none)
        engine = make_engine(self.steps, self.params, config)
        wanted = all_programs(engine.shapes, self.steps.model.config.vocab_size, has_slots=True)
        for done in compile_programs(self.steps, self.params, config, wanted):
            done.result()
        return engine


def answered(engine: Engine, prompts: Sequence[list[int]], max_tokens: int) -> list:
    """The requests for greedy answers, run to their end together."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    requests = [engine.submit(Ask(prompt, params, (0,)))[0] for prompt in prompts]
    while engine.step():
        pass
    return requests


def first_tokens(bench: Bench, rng: np.random.Generator, rounds: int) -> dict:
    """Milliseconds to the first token of prompts that share 1,500 tokens, before and after one of them was run."""
    engine, vocab = bench.engine(SnapshotPolicy()), bench.steps.model.config.vocab_size
    answered(engine, [rng.integers(0, vocab, 600).tolist()], 1)
    cold, second, warm, cached = [], [], [], []
    for _ in range(rounds):
        shared = rng.integers(0, vocab, SHARED).tolist()
        times = []
        for _ in range(4):
            [request] = answered(engine, [shared + rng.integers(0, vocab, OWN).tolist()], 1)
            times.append(1000 * request.metrics().first_token_s)
        cold.append(times[0])
        second.append(times[1])
        warm += times[2:]
        cached.append(request.cached_tokens)
    return {
        "cold_ms": statistics.median(cold),
        "second_ms": statistics.median(second),
        "warm_ms": statistics.median(warm),
        "warm_over_cold": statistics.median(warm) / statistics.median(cold),
        "cached_tokens": cached,
        "prompt_tokens": SHARED + OWN,
    }


def replay(bench: Bench, policy: SnapshotPolicy | None, seed: int, answered_tokens: int) -> dict:
    """Hit rate and first-token times of conversations that take turns: each asks with all that was said before."""
    rng, engine = np.random.default_rng(seed), bench.engine(policy)
    vocab = bench.steps.model.config.vocab_size
    system = rng.integers(0, vocab, SYSTEM).tolist()
    said = [list(system) for _ in range(CONVERSATIONS)]
    times, outputs = [], []
    began = time.perf_counter()
    for _ in range(TURNS):
        for index in range(CONVERSATIONS):
            said[index] += rng.integers(0, vocab, ASKED).tolist()
            [request] = answered(engine, [said[index]], answered_tokens)
            times.append(1000 * request.metrics().first_token_s)
            outputs.append(list(request.output))
            said[index] += request.output
    stats = engine.stats()
    return {
        "hit_rate": stats.hit_rate,
        "cached_tokens": stats.cached_tokens,
        "prompt_tokens": stats.prompt_tokens,
        "first_token_ms": statistics.median(times),
        "seconds": time.perf_counter() - began,
        "snapshots_taken": stats.snapshots_taken,
        "snapshots_evicted": stats.snapshots_evicted,
        "outputs": outputs,
    }


def measured(size: str, rounds: int, answered_tokens: int, replays: bool) -> dict:
    """All figures of one model, with or without `replays` of conversations. No answer may depend on the policy."""
    bench = Bench(size)
    rng = np.random.default_rng(7)
    found = {
        "parameters": num_parameters(bench.params),
        "bytes_per_snapshot": bench.steps.model.layout.bytes_per_slot,
        "answered_tokens": answered_tokens,
        "shared_prefix": first_tokens(bench, rng, rounds),
    }
    if not replays:
        return found | {"conversations": {}}
    runs = {name: replay(bench, policy, 11, answered_tokens) for name, policy in POLICIES.items()}
    outputs = [one.pop("outputs") for one in runs.values()]
    found["same_answers"] = all(one == outputs[0] for one in outputs)
    return found | {"conversations": runs}


def table(results: dict) -> str:
    """The figures as Markdown."""
    lines = [
        "| model | shared + own tokens | cold, ms | second, ms | warm, ms | warm / cold |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for size, one in results.items():
        first = one["shared_prefix"]
        lines.append(
            f"| {size}, {one['parameters'] / 1e6:.1f} M | {SHARED} + {OWN} | {first['cold_ms']:.0f} | "
            f"{first['second_ms']:.0f} | {first['warm_ms']:.0f} | {first['warm_over_cold']:.3f} |"
        )
    lines += ["", f"{CONVERSATIONS} conversations of {TURNS} turns:", ""]
    lines += ["| model | snapshots | hit rate | first token, ms | taken | all, s |", "|---|---|--:|--:|--:|--:|"]
    for size, one in results.items():
        for name, run in one["conversations"].items():
            lines.append(
                f"| {size} | {name} | {run['hit_rate']:.3f} | {run['first_token_ms']:.0f} | {run['snapshots_taken']} | "
                f"{run['seconds']:.1f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", action="append", choices=list(SIZES), help="may be repeated; both by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answered", type=int, default=48, help="tokens of each answer in a conversation")
    parser.add_argument("--no-replays", action="store_true", help="first tokens alone, without conversations")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = {
        size: measured(size, options.rounds, options.answered, not options.no_replays)
        for size in options.size or list(SIZES)
    }
    print(table(results))
    if options.output:
        options.output.write_text(json.dumps({"machine": machine_facts(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
