# SPDX-License-Identifier: Apache-2.0
"""Write the golden checkpoints of families with Mamba-2 layers: `python tests/goldens/make_ssm_goldens.py [case ...]`.

As make_goldens.py, but that greedy tokens come from a forward over all tokens at every step: with a cache, transformers
runs single tokens without the limits of time steps that it keeps everywhere else.
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
from make_goldens import (
    EAGER,
    MIN_MARGIN,
    NEW_TOKENS,
    SEEDS,
    Rejected,
    check_routing,
    corrections,
    forward,
    load,
    require,
)
from ssm_cases import SSM_CASES
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
CONFIG_CLASSES = {
    "mamba2": "Mamba2Config",
    "nemotron_h": "NemotronHConfig",
    "bamba": "BambaConfig",
    "falcon_h1": "FalconH1Config",
}
MEANS = {"A_log": (-2.0, 1.2), "D": (1.0, 0.5), "dt_bias": (0.0, 0.7), "bias": (0.0, 0.3)}
GAINS = {"q_proj": 2.0, "k_proj": 2.0, "v_proj": 2.2, "o_proj": 2.2, "conv1d": 1.2, "lm_head": 1.4}


def make_model(case: dict, changes: dict):
    """The transformers model of a case with changes, its weights not yet filled."""
    source = next(other for other in SSM_CASES if other["name"] == case.get("copy_of", case["name"]))
    config = getattr(transformers, CONFIG_CLASSES[case["family"]])(**json.loads(json.dumps(source["config"] | changes)))
    return AutoModelForCausalLM.from_config(config, **EAGER).eval()


def fill(model: torch.nn.Module, seed: int) -> None:
    """Nothing; every parameter gets a random value that matters. States forget over a few to some dozens of tokens."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            *_, module, kind = name.split(".")
            if parameter.ndim == 1:
                mean, deviation = MEANS.get(kind, (1.0, 0.3))
                parameter.copy_(mean + deviation * noise)
            elif "embed" in module:
                parameter.copy_((0.16 if model.config.tie_word_embeddings else 0.3) * noise)
            else:
                parameter.copy_(GAINS.get(module, 1.6) / math.sqrt(parameter.shape[-1]) * noise)
        for _, buffer in corrections(model):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


def greedy(model, tokens: np.ndarray) -> tuple[np.ndarray, float]:
    """The greedy continuation `[NEW_TOKENS]`, every step a forward over all tokens, and its least top-2 margin."""
    margin = math.inf
    for _ in range(NEW_TOKENS):
        logits = np.sort(last := forward(model, tokens)[-1])
        margin = min(margin, float(logits[-1] - logits[-2]))
        require(margin > MIN_MARGIN, f"a top-2 margin is {margin:.5f}")
        tokens = np.append(tokens, np.int32(np.argmax(last)))
    return tokens[-NEW_TOKENS:].astype(np.int32), margin


def check_weights_matter(case: dict, model, prompt: np.ndarray, logits: np.ndarray) -> None:
    """Nothing, or `Rejected` unless logits have unit scale and context, parameters and features move them."""
    require(0.5 < logits.std() < 3.5, f"logits have std {logits.std():.2f}")
    shuffled = prompt[:33].copy()
    shuffled[:16] = shuffled[:16][::-1]
    moved = np.abs(forward(model, shuffled)[-1] - logits[32]).max()
    require(moved > 0.02, f"shuffling early tokens moves logits by {moved:.3f} only")
    model.zero_grad()
    model(torch.tensor(prompt[None].astype(np.int64)), use_cache=False).logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        if not name.endswith("k_proj.bias"):  # softmax does not see it but through the rotary embedding
            require(parameter.grad.abs().max() > 1e-4, f"{name} does not matter")
        if ".experts." in name:
            require(parameter.grad.abs().flatten(1).amax(1).min() > 1e-5, f"an expert of {name} does not matter")
    for name, buffer in corrections(model):
        kept = buffer.clone()
        buffer.zero_()
        moved = np.abs(forward(model, prompt) - logits).max()
        buffer.copy_(kept)
        require(moved > 1e-2, f"{name} moves logits by {moved:.4f} only")
    for changes in case["ablations"]:
        other = make_model(case, changes)
        other.load_state_dict(model.state_dict(), strict=False)
        moved = np.abs(forward(other, prompt) - logits).max()
        require(moved > 1e-2, f"{changes} moves logits by {moved:.4f} only")


def old_pattern(config: dict) -> None:
    """Nothing; nemotron_h's layers as a pattern, as on the Hub."""
    letters = {"linear_attention": "M", "moe": "E", "full_attention": "*", "mlp": "-"}
    kinds = config.pop("layers_block_type", None) or config.pop("layer_types")
    config.pop("layer_types", None)
    config["hybrid_override_pattern"] = "".join(letters[kind] for kind in kinds)
    config["num_hidden_layers"] = len(kinds)


def old_rope(config: dict) -> None:
    """Nothing; rotary fields as before transformers 5."""
    rope = config.pop("rope_parameters")
    config["rope_theta"], config["rope_scaling"] = rope["rope_theta"], None
    config.pop("layers_block_type", None)
    config.pop("layer_types", None)


def rewrite_config(folder: Path, post) -> None:
    """Nothing; config.json is put in its spelling before transformers 5 by `post`."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.51.0"
    post(config)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def make_case(case: dict, seed: int) -> dict:
    """The row of cases.json for a case whose folder has been written."""
    folder = HERE / case["name"]
    shutil.rmtree(folder, ignore_errors=True)
    model = make_model(case, {})
    fill(model, seed)
    model.save_pretrained(folder)
    if "post" in case:
        rewrite_config(folder, globals()[case["post"]])
    prompt = np.random.default_rng(seed).integers(3, model.config.vocab_size, max(case["lengths"])).astype(np.int32)
    logits = forward(model, prompt)
    loaded = load(folder)
    assert (forward(loaded, prompt) == logits).all(), f"{case['name']}: the written folder loads to other logits"
    check_routing(model, prompt)
    check_weights_matter(case, model, prompt, logits)
    arrays, margins = {"prompt": prompt, f"logits_{len(prompt)}": logits}, []
    for length in case["lengths"]:
        alone = forward(loaded, prompt[:length])
        np.testing.assert_allclose(alone, logits[:length], rtol=0, atol=3e-5)
        ids, margin = greedy(loaded, prompt[:length])
        require(len(set(ids.tolist())) >= 3, f"greedy_{length} repeats {sorted(set(ids.tolist()))}")
        arrays[f"greedy_{length}"] = ids
        margins.append(margin)
    if "copy_of" in case:
        original = np.load(HERE / case["copy_of"] / "golden.npz")
        same = all((original[name] == arrays[name]).all() for name in original)
        assert same, f"{case['name']} differs from {case['copy_of']}"
    np.savez_compressed(folder / "golden.npz", **arrays)
    options = {key: case[key] for key in ("copy_of", "lengths") if key in case}
    return {
        "name": case["name"],
        "family": case["family"],
        "seed": seed,
        "min_margin": round(min(margins), 5),
        **options,
    }


def main(names: list[str]) -> None:
    """Nothing; writes the named cases, or all, and cases.json."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    path = HERE / "cases.json"
    for case in SSM_CASES:
        if names and case["name"] not in names:
            continue
        start = 1000 * (zlib.crc32(case.get("copy_of", case["name"]).encode()) % 10000)
        for seed in range(start, start + SEEDS):
            try:
                row = make_case(case, seed)
            except Rejected as reason:
                print(f"{case['name']} seed {seed}: {reason}", flush=True)
                continue
            size = sum(file.stat().st_size for file in (HERE / case["name"]).iterdir())
            print(f"{row} {size // 1000} kB", flush=True)
            break
        else:
            raise SystemExit(
                f"{case['name']}: none of {SEEDS} seeds from {start} will do; change the scales in fill()."
            )
        rows = {row["name"]: row for row in json.loads(path.read_text())} | {row["name"]: row}
        path.write_text("[\n" + ",\n".join("  " + json.dumps(one) for one in rows.values()) + "\n]\n")


if __name__ == "__main__":
    main(sys.argv[1:])
