# SPDX-License-Identifier: Apache-2.0
"""A whole checkpoint that fits in a second: tiny random weights, a tokenizer of bytes and a chat template."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|end|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 263, 36, 2, 6, 2, 10, 44
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_chat(directory: Path, seed: int = 7) -> Path:
    """The directory, made into a checkpoint of a llama with 259 tokens, every byte one of them; weights by `seed`."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(directory)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": 258,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(_weights(np.random.default_rng(seed)), directory / "model.safetensors")
    return directory


def _write_tokenizer(directory: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2], "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | names))


def _weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    def drawn(*shape, scale=0.15):
        return rng.normal(0, scale, shape).astype(np.float32)

    weights = {"model.embed_tokens.weight": drawn(VOCAB_SIZE, WIDTH), "model.norm.weight": 1 + drawn(WIDTH)}
    for layer in range(LAYERS):
        place = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, WIDTH),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, WIDTH),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, WIDTH),
            "self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
            "mlp.gate_proj": (HIDDEN, WIDTH),
            "mlp.up_proj": (HIDDEN, WIDTH),
            "mlp.down_proj": (WIDTH, HIDDEN),
        }
        weights |= {f"{place}{name}.weight": drawn(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{place}{name}.weight"] = 1 + drawn(WIDTH)
    return weights
