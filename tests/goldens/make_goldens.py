# SPDX-License-Identifier: Apache-2.0
"""Write the golden checkpoints of the dense families: `python tests/goldens/make_goldens.py [case ...]`.

Each case becomes `tests/goldens/<case>/`: a float32 checkpoint as transformers saves it, and `golden.npz` with what
transformers computes from it (eager attention, CPU, a freshly loaded model for each forward, because dynamic models
remember earlier lengths). Needs torch, transformers, numpy and safetensors; the tests read the result without the
first two.
"""

import json
import math
import shutil
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers
from golden_cases import BASE, CASES
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
LENGTHS = (1, 7, 33, 130)
NEW_TOKENS = 20
SEEDS = 400
MIN_MARGIN = 1e-3
CONFIG_CLASSES = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "gemma2": "Gemma2Config",
    "gemma3": "Gemma3TextConfig",
    "phi3": "Phi3Config",
    "olmo2": "Olmo2Config",
    "granite": "GraniteConfig",
}


class Rejected(Exception):
    """The random weights of this seed do not meet the requirements; the next seed may."""


def require(condition: bool, message: str) -> None:
    """Nothing, or `Rejected` with the message."""
    if not condition:
        raise Rejected(message)


def make_config(case: dict, changes: dict | None = None):
    """The transformers config of a case with changes; a `head_dim` of None is left to the family."""
    source = next(other for other in CASES if other["name"] == case.get("copy_of", case["name"]))
    merged = BASE | source["config"]
    values = {key: value for key, value in merged.items() if not (key == "head_dim" and value is None)}
    config_class = getattr(transformers, CONFIG_CLASSES[case["family"]])
    config = config_class(**json.loads(json.dumps(values)))
    if not changes:
        return config
    fields = {key: value for key, value in config.to_dict().items() if key != "transformers_version"}
    return config_class(**json.loads(json.dumps(fields | changes)))


def fill(model: torch.nn.Module, family: str, seed: int) -> None:
    """Nothing; every parameter gets a random value that matters (see the README for the scales)."""
    generator = torch.Generator().manual_seed(seed)
    neutral = 0.0 if family.startswith("gemma") else 1.0
    gains = {"q_proj": 1.6, "k_proj": 1.6, "qkv_proj": 1.6, "v_proj": 2.2, "o_proj": 2.2, "lm_head": 1.4}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(neutral + 0.3 * noise)
            elif "embed_tokens" in name:
                parameter.copy_((0.12 if model.config.tie_word_embeddings else 0.25) * noise)
            else:
                module = name.split(".")[-2]
                parameter.copy_(gains.get(module, 1.5) / math.sqrt(parameter.shape[1]) * noise)


def load(folder: Path):
    """A fresh model from a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def forward(model, tokens: np.ndarray) -> np.ndarray:
    """Logits `[T, V]` of a forward without cache."""
    with torch.no_grad():
        return model(torch.tensor(tokens[None].astype(np.int64)), use_cache=False).logits[0].numpy()


def greedy(folder: Path, tokens: np.ndarray, use_cache: bool = True) -> tuple[np.ndarray, float]:
    """The greedy continuation `[NEW_TOKENS]` by `generate`, and its least top-2 margin."""
    out = load(folder).generate(
        torch.tensor(tokens[None].astype(np.int64)),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
        use_cache=use_cache,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids = out.sequences[0, len(tokens) :].numpy().astype(np.int32)
    require(len(ids) == NEW_TOKENS, f"{len(ids)} tokens instead of {NEW_TOKENS}")
    top = torch.stack(out.logits)[:, 0].topk(2).values
    return ids, float((top[:, 0] - top[:, 1]).min())


def rewrite_config(folder: Path, post: str) -> None:
    """Nothing; config.json is put in the spelling of the Hub before transformers 5, or loses all it says of rope."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.51.0"
    rope = config.pop("rope_parameters")
    if post != "no_rope":
        if "full_attention" in rope:
            local, rope = rope["sliding_attention"], rope["full_attention"]
            config["rope_local_base_freq"] = local["rope_theta"]
            config["sliding_window_pattern"] = 1 + config.pop("layer_types").index("full_attention")
        elif config["model_type"].startswith("qwen"):
            config.pop("layer_types")
        config["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        if "original_max_position_embeddings" in config:
            rope.pop("original_max_position_embeddings", None)
        rope_type = rope.pop("rope_type")
        spelling = "type" if post == "old_type" else "rope_type"
        config["rope_scaling"] = None if rope_type == "default" else {spelling: rope_type, **rope}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write_checkpoint(case: dict, folder: Path, seed: int) -> torch.nn.Module:
    """The model that was saved to the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    config = make_config(case)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    fill(model, case["family"], seed)
    model.save_pretrained(folder, max_shard_size=case.get("shard", "1GB"))
    return model


def check_weights_matter(case: dict, model, prompt: np.ndarray, logits: np.ndarray) -> None:
    """Nothing, or `Rejected` unless logits have unit scale and context, parameters and features move them."""
    require(0.5 < logits.std() < 3.0, f"logits have std {logits.std():.2f}")
    shuffled = prompt[:33].copy()
    shuffled[:16] = shuffled[:16][::-1]
    moved = np.abs(forward(model, shuffled)[-1] - forward(model, prompt[:33])[-1]).max()
    require(moved > 0.1, f"shuffling early tokens moves logits by {moved:.3f} only")
    model.zero_grad()
    model(torch.tensor(prompt[None].astype(np.int64)), use_cache=False).logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        require(parameter.grad.abs().max() > 1e-4, f"{name} does not matter")
    for changes in [{"rms_norm_eps": 1e-6}, *case["ablations"]]:
        config = make_config(case, changes)
        config._attn_implementation = "eager"
        other = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        other.load_state_dict(model.state_dict())
        moved = np.abs(forward(other, prompt)[-1] - logits[-1]).max()
        limit = 0.1 if "sliding_window" in changes else 2e-3 if "rms_norm_eps" in changes else 1e-2
        require(moved > limit, f"{changes} moves logits by {moved:.4f} only")


def compute(case: dict, folder: Path, prompt: np.ndarray) -> tuple[dict, float]:
    """The arrays of golden.npz and the least top-2 margin over all greedy runs, `Rejected` if that is too small."""
    arrays = {"prompt": prompt}
    margins = []
    for length in LENGTHS:
        arrays[f"logits_{length}"] = forward(load(folder), prompt[:length])
    for length in (*LENGTHS, *case.get("crossings", ())):
        ids, margin = greedy(folder, prompt[:length])
        require(len(set(ids.tolist())) >= 5, f"greedy_{length} repeats {sorted(set(ids.tolist()))}")
        uncached, uncached_margin = greedy(folder, prompt[:length], use_cache=False)
        margins += [margin, uncached_margin]
        require(min(margins) > MIN_MARGIN, f"greedy_{length} has a top-2 margin of {min(margins):.5f}")
        arrays[f"greedy_{length}"] = ids
        if case.get("stateful"):
            arrays[f"greedy_{length}_uncached"] = uncached
        else:
            assert (ids == uncached).all(), f"{case['name']}: cache changes greedy_{length}"
    return arrays, min(margins)


def make_case(case: dict, seed: int) -> dict:
    """The row of cases.json for a case whose folder has been written."""
    folder = HERE / case["name"]
    model = write_checkpoint(case, folder, seed)
    prompt = np.random.default_rng(seed).integers(3, model.config.vocab_size, max(LENGTHS)).astype(np.int32)
    logits = forward(model, prompt)
    if "post" in case:
        rewrite_config(folder, case["post"])
    assert (forward(load(folder), prompt) == logits).all(), f"{case['name']}: the written folder loads to other logits"
    arrays, margin = compute(case, folder, prompt)
    check_weights_matter(case, model, prompt, logits)
    if "copy_of" in case:
        original = np.load(HERE / case["copy_of"] / "golden.npz")
        same = all((original[name] == arrays[name]).all() for name in original)
        assert same, f"{case['name']} differs from {case['copy_of']}"
    np.savez_compressed(folder / "golden.npz", **arrays)
    options = {key: case[key] for key in ("copy_of", "stateful", "crossings") if key in case}
    return {"name": case["name"], "family": case["family"], "seed": seed, "min_margin": round(margin, 5), **options}


def main(names: list[str]) -> None:
    """Nothing; writes the named cases, or all, and cases.json."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    path = HERE / "cases.json"
    rows = {row["name"]: row for row in json.loads(path.read_text())} if path.exists() else {}
    for case in CASES:
        if names and case["name"] not in names:
            continue
        start = 1000 * (zlib.crc32(case.get("copy_of", case["name"]).encode()) % 10000)
        for seed in range(start, start + SEEDS):
            try:
                rows[case["name"]] = make_case(case, seed)
            except Rejected as reason:
                print(f"{case['name']} seed {seed}: {reason}", flush=True)
                continue
            size = sum(file.stat().st_size for file in (HERE / case["name"]).iterdir())
            print(f"{rows[case['name']]} {size // 1000} kB", flush=True)
            break
        else:
            raise SystemExit(
                f"{case['name']}: none of {SEEDS} seeds from {start} will do; change the scales in fill()."
            )
        listed = [rows[other["name"]] for other in CASES if other["name"] in rows]
        path.write_text("[\n" + ",\n".join("  " + json.dumps(row) for row in listed) + "\n]\n")


if __name__ == "__main__":
    main(sys.argv[1:])
