# SPDX-License-Identifier: Apache-2.0
"""Write goldens of real GGUF models: `python tests/goldens/make_gguf_goldens.py <alias>=<file.gguf> ...`.

Each file is dequantised to float32 with the gguf package, put into the transformers model, and run on the CPU: greedy
continuations of fixed prompts and the perplexity of a fixed text go to `tests/goldens/gguf/<alias>.json`. Where
accelerate is installed, the weights are compared with those of transformers' own GGUF loader, and must be equal.
"""

import gc
import hashlib
import importlib.util
import json
import math
import resource
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf_texts import CHAT_PROMPTS, PERPLEXITY_TEXT, PROMPTS
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig, LlamaConfig

HERE = Path(__file__).resolve().parent
NEW_TOKENS = 32
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FFN_NORMS = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}


def make_config(reader: gguf.GGUFReader):
    """The transformers config that the file's metadata describes."""
    arch = reader.fields["general.architecture"].contents()

    def field(name: str):
        return reader.fields[f"{arch}.{name}"].contents()

    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    common = {
        "vocab_size": int(embedding.shape[1]),
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": field("attention.head_count"),
        "num_key_value_heads": field("attention.head_count_kv"),
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
    }
    theta = field("rope.freq_base")
    if arch == "llama":
        return LlamaConfig(**common, rope_parameters={"rope_type": "default", "rope_theta": theta})
    assert arch == "gemma3", f"no config for GGUF architecture {arch}"
    rope = {"full_attention": {"rope_type": "default", "rope_theta": theta}}
    rope["sliding_attention"] = {"rope_type": "default", "rope_theta": 10000.0}
    head_dim = field("attention.key_length")
    return Gemma3TextConfig(
        **common,
        head_dim=head_dim,
        query_pre_attn_scalar=head_dim,
        sliding_window=field("attention.sliding_window"),
        rope_parameters=rope,
    )


def dequantised(tensor, arch: str, config) -> tuple[str, torch.Tensor]:
    """The transformers name and float32 weights of one GGUF tensor."""
    weights = gguf.dequantize(tensor.data, tensor.tensor_type)
    parts = tensor.name.split(".")
    names = TENSOR_NAMES | FFN_NORMS[arch]
    name = names[parts[-2]] if parts[0] != "blk" else f"model.layers.{parts[1]}.{names[parts[2]]}"
    if arch == "llama" and parts[-2] in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if parts[-2] == "attn_q" else config.num_key_value_heads
        # llama.cpp interleaves the two rotary halves of each head
        weights = weights.reshape(heads, -1, 2, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)
    if arch == "gemma3" and parts[-2].endswith("norm"):
        weights = weights - 1  # the file holds 1 + w
    return f"{name}.{parts[-1]}", torch.from_numpy(np.array(weights, np.float32))


def load(path: Path):
    """The float32 model of a GGUF file."""
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    config = make_config(reader)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    state = dict(dequantised(tensor, arch, config) for tensor in reader.tensors)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, f"missing {missing}, unexpected {unexpected}"
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight or "lm_head.weight" in state
    return model


def compare_with_transformers(model, path: Path) -> bool:
    """Whether transformers' own loader was there to compare with; asserts that the weights are equal."""
    if importlib.util.find_spec("accelerate") is None:
        return False
    other = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    theirs = other.state_dict()
    for name, weights in model.state_dict().items():
        assert torch.equal(weights, theirs[name]), f"{path.name}: {name} differs from transformers' GGUF loader"
    for key in ("rope_parameters", "layer_types", "sliding_window", "head_dim", "rms_norm_eps", "vocab_size"):
        mine, their = getattr(model.config, key, None), getattr(other.config, key, None)
        assert mine == their, f"{path.name}: {key} is {mine} here and {their} in transformers' GGUF loader"
    return True


def continue_greedily(model, text: str, ids: list[int]) -> dict:
    """A prompt with its greedy continuation and the top-2 margin at each step."""
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    top = torch.stack(out.logits)[:, 0].topk(2).values
    margins = (top[:, 0] - top[:, 1]).tolist()
    greedy = out.sequences[0, len(ids) :].tolist()
    assert len(greedy) == NEW_TOKENS, f"{len(greedy)} tokens for {text!r}"
    rounded = [round(margin, 5) for margin in margins]
    return {"text": text, "ids": ids, "greedy": greedy, "min_margin": min(rounded), "margins": rounded}


def perplexity(model, ids: list[int]) -> dict:
    """Negative log likelihoods of tokens 1.. given all before them, natural logarithm."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
        nll = []
        for start in range(0, len(ids) - 1, 64):
            stop = min(start + 64, len(ids) - 1)
            rows = torch.log_softmax(logits[start:stop].double(), -1)
            nll += (-rows[torch.arange(stop - start), torch.tensor(ids[start + 1 : stop + 1])]).tolist()
    mean = math.fsum(nll) / len(nll)
    return {"ids": ids, "mean_nll": mean, "perplexity": math.exp(mean), "nll": [round(value, 5) for value in nll]}


def make_golden(alias: str, path: Path) -> None:
    """Nothing; writes gguf/<alias>.json."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = load(path)
    compared = compare_with_transformers(model, path)
    gc.collect()
    model.generation_config.eos_token_id = None
    texts = list(PROMPTS)
    if tokenizer.chat_template:
        for text in CHAT_PROMPTS:
            message = [{"role": "user", "content": text}]
            texts.append(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
        texts = texts[len(CHAT_PROMPTS) :]
    golden = {
        "file": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "transformers": transformers.__version__,
        "weights_equal_transformers_loader": compared,
        "prompts": [continue_greedily(model, text, tokenizer(text).input_ids) for text in texts],
        "perplexity": {"text": PERPLEXITY_TEXT, **perplexity(model, tokenizer(PERPLEXITY_TEXT).input_ids)},
    }
    folder = HERE / "gguf"
    folder.mkdir(exist_ok=True)
    (folder / f"{alias}.json").write_text(json.dumps(golden, ensure_ascii=False) + "\n")
    for prompt in golden["prompts"]:
        print(f"{prompt['min_margin']:.4f} {prompt['text']!r} -> {tokenizer.decode(prompt['greedy'])!r}")
    result = golden["perplexity"]
    print(f"{alias}: {len(result['ids'])} tokens, perplexity {result['perplexity']:.4f}, compared: {compared}")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB", flush=True)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for argument in sys.argv[1:]:
        alias, _, file = argument.partition("=")
        make_golden(alias, Path(file).resolve())
