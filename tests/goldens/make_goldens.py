# SPDX-License-Identifier: Apache-2.0
"""Write the golden checkpoints: `python tests/goldens/make_goldens.py [case ...]`.

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
from delta_cases import DELTA_CASES
from golden_cases import BASE, DENSE_CASES
from hub_files import as_on_the_hub
from moe_cases import MOE_CASES
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

CASES = DENSE_CASES + MOE_CASES + DELTA_CASES
HERE = Path(__file__).resolve().parent
LENGTHS = (1, 7, 33, 130)
NEW_TOKENS = 20
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
SEEDS = 400
MIN_MARGIN = 1e-3
MIN_ROUTER_MARGIN = 4e-6
# Families whose states carry rounding from token to token, and what a part in ten million of each weight may do.
RECURRENT = {"qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear"}
MOST_SENSITIVE = 5e-5
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
    "qwen3_moe": "Qwen3MoeConfig",
    "mixtral": "MixtralConfig",
    "glm4_moe": "Glm4MoeConfig",
    "minimax_m2": "MiniMaxM2Config",
    "gpt_oss": "GptOssConfig",
    "qwen3_next": "Qwen3NextConfig",
    "qwen3_5": "Qwen3_5TextConfig",
    "qwen3_5_moe": "Qwen3_5MoeTextConfig",
    "olmo_hybrid": "OlmoHybridConfig",
    "kimi_linear": "KimiLinearConfig",
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
    neutral = 0.0 if family.startswith(("gemma", "qwen3_next", "qwen3_5")) else 1.0
    gains = {"q_proj": 1.6, "k_proj": 1.6, "qkv_proj": 1.6, "v_proj": 2.2, "o_proj": 2.2, "lm_head": 1.4}
    if family in RECURRENT:
        gains["lm_head"] = 0.8
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("bias", "sinks")):
                parameter.copy_((1.0 if name.endswith("sinks") else 0.3) * noise)
            elif name.endswith("A_log"):
                parameter.copy_(noise - 1)
            elif name.endswith("linear_attn.norm.weight"):
                parameter.copy_(1 + 0.3 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(neutral + 0.3 * noise)
            elif "embed_tokens" in name:
                parameter.copy_((0.12 if model.config.tie_word_embeddings else 0.25) * noise)
            else:
                module = name.split(".")[-2]
                # Experts are [E, out, in], gpt-oss' [E, in, out].
                fan_in = parameter.shape[1 if family == "gpt_oss" else -1]
                parameter.copy_(gains.get(module, 1.5) / math.sqrt(fan_in) * noise)
        for _, buffer in corrections(model):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


def corrections(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The buffers that move a router's choice."""
    return [pair for pair in model.named_buffers() if pair[0].endswith("e_score_correction_bias")]


def load(folder: Path):
    """A fresh model from a folder."""
    packed = "quantization_config" in json.loads((folder / "config.json").read_text())
    options = {"quantization_config": transformers.Mxfp4Config(dequantize=True)} if packed else {}
    model = AutoModelForCausalLM.from_pretrained(folder, **EAGER, **options).eval()
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
            config.pop("layer_types", None)
            if "num_local_experts" in config:
                config["num_experts"] = config.pop("num_local_experts")
        config["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        if "original_max_position_embeddings" in config:
            rope.pop("original_max_position_embeddings", None)
        rope_type = rope.pop("rope_type")
        if post == "old_rotary_dim":
            config["rotary_dim"] = int(config["head_dim"] * config.pop("partial_rotary_factor"))
        spelling = "type" if post == "old_type" else "rope_type"
        config["rope_scaling"] = None if rope_type == "default" else {spelling: rope_type, **rope}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write_checkpoint(case: dict, folder: Path, seed: int) -> torch.nn.Module:
    """The model that was saved to the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    config = make_config(case)
    model = AutoModelForCausalLM.from_config(config, **EAGER).eval()
    fill(model, case["family"], seed)
    model.save_pretrained(folder, max_shard_size=case.get("shard", "1GB"))
    if case.get("mxfp4"):
        pack_experts(folder, seed)
        return load(folder)
    return model


def pack_experts(folder: Path, seed: int) -> None:
    """Nothing; the experts' weights in the folder are random MXFP4 blocks and scales, of about the same size."""
    rng = np.random.default_rng(seed)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, columns, rows = tensors.pop(name).shape
        size = (count, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.tensor(rng.integers(0, 256, (*size, 16)).astype(np.uint8))
        middle = 127 + round(math.log2(0.6 / math.sqrt(columns)))
        tensors[f"{name}_scales"] = torch.tensor(rng.integers(middle - 1, middle + 2, size).astype(np.uint8))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def check_routing(model, prompt: np.ndarray) -> None:
    """Nothing, or `Rejected` if a token's last chosen expert is hardly better than the first that was not."""
    margins = []

    def look(router, inputs, outputs):
        logits, _, chosen = outputs
        scores = logits.float().sigmoid() if corrections(model) else logits.float().softmax(-1)
        bias = inputs[1] if len(inputs) > 1 else getattr(router, "e_score_correction_bias", 0)
        ranked = (scores + bias).sort(-1, descending=True).values
        margins.append(float((ranked[:, chosen.shape[-1] - 1] - ranked[:, chosen.shape[-1]]).min()))

    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    hooks = [module.register_forward_hook(look) for module in routers]
    forward(model, prompt)
    for hook in hooks:
        hook.remove()
    least = min(margins, default=1.0)
    require(least > MIN_ROUTER_MARGIN, f"a router's choice has a margin of {least:.6f}")


def check_condition(folder: Path, prompt: np.ndarray, logits: np.ndarray) -> None:
    """Nothing, or `Rejected` if rounding alone would move logits by as much as the tests let pass."""
    for seed in range(3):
        model, generator = load(folder), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 1e-7 * torch.randn(parameter.shape, generator=generator))
        moved = np.abs(forward(model, prompt) - logits).max()
        require(moved < MOST_SENSITIVE, f"a part in ten million of the weights moves logits by {moved:.6f}")


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
        if ".experts." in name:
            require(parameter.grad.abs().flatten(1).amax(1).min() > 1e-5, f"an expert of {name} does not matter")
    for name, buffer in corrections(model):
        kept = buffer.clone()
        buffer.zero_()
        moved = np.abs(forward(model, prompt)[-33:] - logits[-33:]).max()
        buffer.copy_(kept)
        require(moved > 1e-2, f"{name} moves logits by {moved:.4f} only")
    for changes in [{"rms_norm_eps": 1e-6}, *case["ablations"]]:
        config = make_config(case, changes)
        other = AutoModelForCausalLM.from_config(config, **EAGER).eval()
        other.load_state_dict(model.state_dict())
        moved = np.abs(forward(other, prompt)[-1] - logits[-1]).max()
        limit = 0.1 if "sliding_window" in changes else 2e-3 if "rms_norm_eps" in changes else 1e-2
        require(moved > limit, f"{changes} moves logits by {moved:.4f} only")


def compute(case: dict, folder: Path, prompt: np.ndarray) -> tuple[dict, float]:
    """The arrays of golden.npz and the least top-2 margin over all greedy runs, `Rejected` if that is too small."""
    arrays = {"prompt": prompt}
    margins = []
    lengths = case.get("lengths", LENGTHS)
    least = 3 if "lengths" in case else 5  # of so many runs one is nearly always dull
    for length in lengths:
        arrays[f"logits_{length}"] = forward(load(folder), prompt[:length])
    if "lengths" in case:
        whole = arrays[f"logits_{max(lengths)}"]
        for length in sorted(lengths)[:-1]:
            moved = np.abs(arrays.pop(f"logits_{length}") - whole[:length]).max()
            require(moved < 2e-5, f"logits_{length} are {moved:.6f} off those of the whole prompt")
    for length in (*lengths, *case.get("crossings", ())):
        ids, margin = greedy(folder, prompt[:length])
        require(len(set(ids.tolist())) >= least, f"greedy_{length} repeats {sorted(set(ids.tolist()))}")
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
    lengths = case.get("lengths", LENGTHS)
    prompt = np.random.default_rng(seed).integers(3, model.config.vocab_size, max(lengths)).astype(np.int32)
    logits = forward(model, prompt)
    if "post" in case:
        rewrite_config(folder, case["post"])
    if "hub" in case:
        as_on_the_hub(case["family"], folder)
    assert (forward(load(folder), prompt) == logits).all(), f"{case['name']}: the written folder loads to other logits"
    check_routing(model, prompt)
    if case["family"] in RECURRENT:
        check_condition(folder, prompt, logits)
    check_weights_matter(case, model, prompt, logits)
    arrays, margin = compute(case, folder, prompt)
    if "copy_of" in case:
        original = np.load(HERE / case["copy_of"] / "golden.npz")
        same = all((original[name] == arrays[name]).all() for name in original)
        assert same, f"{case['name']} differs from {case['copy_of']}"
    np.savez_compressed(folder / "golden.npz", **arrays)
    options = {key: case[key] for key in ("copy_of", "stateful", "crossings", "lengths") if key in case}
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
