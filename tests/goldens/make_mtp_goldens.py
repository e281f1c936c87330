# SPDX-License-Identifier: Apache-2.0
"""Write `mtp/<case>.safetensors` and `mtp/<case>.npz`: layers that draft tokens for stored cases, and what they draft.
`python tests/goldens/make_mtp_goldens.py`.

Transformers has no such layers. They are put together here from its own decoder layers and norms of each family, as the
DeepSeek-V3 report says and under the names of published checkpoints: a norm over the embedding of token p and one over
the final row of token p - 1 (zeros where p is 0), a linear layer of the two, a decoder layer, a norm, the model's head.
"""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

HERE = Path(__file__).parent
LENGTHS, DRAFTS = (5, 14, 27), 3
# Greedy drafts must not hang on rounding.
MARGIN = 1e-3


@dataclass(frozen=True)
class Case:
    """A stored checkpoint, how its layers are made, and what published files call their parts: those around the decoder
    layer, and what the layer's own tensors begin with."""

    name: str
    layer: type
    norm: type
    index: int
    around: dict
    prefix: str


CASES = (
    Case(
        "qwen3-next",
        qwen.Qwen3NextDecoderLayer,
        qwen.Qwen3NextRMSNorm,
        1,
        {
            "embed_norm": "mtp.pre_fc_norm_embedding",
            "hidden_norm": "mtp.pre_fc_norm_hidden",
            "fc": "mtp.fc",
            "final_norm": "mtp.norm",
        },
        "mtp.layers.0.",
    ),
    Case(
        "glm4-moe",
        glm.Glm4MoeDecoderLayer,
        glm.Glm4MoeRMSNorm,
        2,
        {
            "embed_norm": "model.layers.3.enorm",
            "hidden_norm": "model.layers.3.hnorm",
            "fc": "model.layers.3.eh_proj",
            "final_norm": "model.layers.3.shared_head.norm",
        },
        "model.layers.3.",
    ),
)


def randomised(module: nn.Module, generator: torch.Generator, plus_one: bool) -> nn.Module:
    """The module with every parameter and buffer of weights random, as `make_goldens.py` has them."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        noise = torch.randn(tensor.shape, generator=generator)
        with torch.no_grad():
            if "norm" in name:
                tensor.copy_(0.3 * noise + (0 if plus_one else 1))
            elif tensor.ndim == 1:
                tensor.copy_(0.2 * noise)
            else:
                tensor.copy_(noise * tensor.shape[-1] ** -0.5)
    return module


def make_parts(case: Case, config, seed: int) -> SimpleNamespace:
    """The modules of a layer that drafts."""
    generator = torch.Generator().manual_seed(seed)
    width, norms = config.hidden_size, ("embed_norm", "hidden_norm", "final_norm")
    parts = {name: case.norm(width, eps=config.rms_norm_eps) for name in norms}
    parts["fc"] = nn.Linear(2 * width, width, bias=False)
    parts["layer"] = case.layer(config, case.index)
    holder = nn.ModuleDict(parts)
    randomised(holder, generator, case.norm is qwen.Qwen3NextRMSNorm)
    return SimpleNamespace(**parts)


def named(case: Case, parts: SimpleNamespace) -> dict:
    """The tensors as published checkpoints name them, one for each expert."""
    found = {f"{name}.weight": getattr(parts, part).weight for part, name in case.around.items()}
    for name, tensor in parts.layer.state_dict().items():
        if name.endswith("mlp.experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                for which, half in zip(("gate", "up"), both.chunk(2), strict=True):
                    found[f"{case.prefix}mlp.experts.{expert}.{which}_proj.weight"] = half
        elif name.endswith("mlp.experts.down_proj"):
            for expert, one in enumerate(tensor):
                found[f"{case.prefix}mlp.experts.{expert}.down_proj.weight"] = one
        else:
            found[case.prefix + name] = tensor
    return {name: tensor.detach().contiguous().clone() for name, tensor in found.items()}


def entry_rows(model, parts, tokens, features):
    """Final rows of all entries, over the whole sequence at once."""
    base = model.model
    embeds = base.embed_tokens(torch.tensor(tokens))[None]
    x = parts.fc(torch.cat([parts.embed_norm(embeds), parts.hidden_norm(features[None])], dim=-1))
    length = x.shape[1]
    positions = torch.arange(length)[None]
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    turned = base.rotary_emb(x, positions)
    x = parts.layer(x, position_embeddings=turned, attention_mask=mask, position_ids=positions)
    return parts.final_norm(x)[0]


def drafted(model, parts, tokens: list[int]):
    """Greedy drafts after `tokens`, the last of which the model has not run, and the logits of each."""
    hidden = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
    features = torch.cat([torch.zeros(1, hidden.shape[1]), hidden])
    tokens, drafts, logits = list(tokens), [], []
    for _ in range(DRAFTS):
        row = entry_rows(model, parts, tokens, features)[-1]
        logits.append(model.lm_head(row))
        drafts.append(int(logits[-1].argmax()))
        tokens.append(drafts[-1])
        features = torch.cat([features, row[None]])
    return drafts, torch.stack(logits)


@torch.no_grad()
def write(case: Case) -> None:
    """Nothing; writes one case, of the first seed whose drafts are far from ties."""
    model = AutoModelForCausalLM.from_pretrained(
        HERE / case.name, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    prompt = np.load(HERE / case.name / "golden.npz")["prompt"].tolist()
    for seed in range(100):
        parts = make_parts(case, model.config, seed)
        found = [drafted(model, parts, prompt[: length + 1]) for length in LENGTHS]
        logits = torch.stack([one for _, one in found])
        best = logits.topk(2).values
        if (best[..., 0] - best[..., 1]).min() > MARGIN and len({tuple(drafts) for drafts, _ in found}) == len(LENGTHS):
            break
    (HERE / "mtp").mkdir(exist_ok=True)
    save_file(named(case, parts), HERE / "mtp" / f"{case.name}.safetensors", metadata={"format": "pt"})
    np.savez_compressed(
        HERE / "mtp" / f"{case.name}.npz",
        lengths=np.asarray(LENGTHS, np.int32),
        drafts=np.asarray([drafts for drafts, _ in found], np.int32),
        logits=logits.numpy(),
    )
    print(case.name, seed, [drafts for drafts, _ in found], float(logits.std()))


if __name__ == "__main__":
    for each in CASES:
        write(each)
