# SPDX-License-Identifier: Apache-2.0
"""Write what transformers' beam search finds: `python tests/goldens/make_beam_goldens.py [source ...]`.

A source is one of the tiny checkpoints in `MODELS`, or `tables`: a model whose logits are sums of rows of a table (see
`table_logits`), for searches that no tensor library is needed to repeat. Each becomes `beams/<source>.json`, a list of
groups that name a search and hold its hypotheses for each `early_stopping`. Needs torch and transformers.
"""

import json
import sys
import warnings
import zlib
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import torch
import transformers
from make_goldens import load
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

HERE = Path(__file__).resolve().parent
MODELS = ("llama-default", "gemma2", "qwen3", "granite")
WIDTHS = (2, 3, 4, 5)
LENGTH_PENALTIES = (0.0, 0.5, 1.0, 2.0, -1.0)
EARLY_STOPPING = {"true": True, "false": False, "never": "never"}
MAX_TOKENS = (1, 2, 4, 7, 10, 14, 19, 24)
PROMPT_LENGTHS = (1, 6, 13, 20)
NOISE = 5e-5
NOISE_SEEDS = (1, 2)
DRAWS = 3
TABLE_VOCABULARY = 12
TABLE_GROUPS = 80


def table_logits(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Float32 `[V, V]` twice: what the last token and the one before it add to the logits of the next."""
    rng = np.random.default_rng(seed)
    shape = (2, TABLE_VOCABULARY, TABLE_VOCABULARY)
    return tuple((2 * rng.standard_normal(shape)).astype(np.float32))


class TableConfig(PreTrainedConfig):
    """A config with nothing but what `generate` asks for."""

    model_type = "table"


class TableModel(PreTrainedModel, GenerationMixin):
    """Logits that are the sum of two rows of a table."""

    config_class = TableConfig

    def __init__(self, seed: int):
        super().__init__(TableConfig(vocab_size=TABLE_VOCABULARY, num_hidden_layers=1))
        self.last, self.before = (torch.nn.Parameter(torch.tensor(part)) for part in table_logits(seed))
        self.generation_config.use_cache = False

    def forward(self, input_ids, **_):
        """Logits `[S, 1, V]` after the last of at least two tokens."""
        logits = self.last[input_ids[:, -1]] + self.before[input_ids[:, -2]]
        return CausalLMOutputWithPast(logits=logits[:, None])


class Noise(LogitsProcessor):
    """Log-probabilities off by up to `NOISE`: what another implementation of the model may differ by, and more."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids, scores):
        """The scores with the noise added."""
        return scores + NOISE * (2 * torch.rand(scores.shape, generator=self.generator) - 1)


def search(model, prompt: list[int], group: dict, early_stopping, noise: list[LogitsProcessor]):
    """`[(token ids, score)]` of the returned sequences, best first, each cut after its stop token."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_beams=group["width"],
        num_return_sequences=group["num_return"],
        length_penalty=group["length_penalty"],
        early_stopping=early_stopping,
        max_new_tokens=group["max_tokens"],
        min_new_tokens=group["min_tokens"] or None,
        eos_token_id=group["stop_ids"],
        pad_token_id=0,
        logits_processor=LogitsProcessorList(noise),
        output_scores=True,
        return_dict_in_generate=True,
    )
    found = []
    for row, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
        ends = [index for index, token in enumerate(row) if token in group["stop_ids"]]
        assert ends or len(row) == group["max_tokens"], f"{row} neither stops nor reaches {group['max_tokens']} tokens"
        found.append((row[: ends[0] + 1] if ends else row, score))
    return found


def likely_tokens(model, prompt: list[int]) -> list[int]:
    """The ids that are most often among the four best of a beam in a search that nothing stops."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_beams=max(WIDTHS),
        max_new_tokens=max(MAX_TOKENS),
        eos_token_id=None,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(out.scores).topk(4).indices.flatten().tolist()
    return [token for token, _ in Counter(best).most_common(12)]


def searched(model, prompt: list[int], group: dict) -> dict | None:
    """The group with what was found, or None if noise changes it or all hypotheses are of one length."""
    found = {}
    for name, early_stopping in EARLY_STOPPING.items():
        found[name] = search(model, prompt, group, early_stopping, [])
        for seed in NOISE_SEEDS:
            noisy = search(model, prompt, group, early_stopping, [Noise(seed)])
            if [tokens for tokens, _ in noisy] != [tokens for tokens, _ in found[name]]:
                return None
    lengths = {len(tokens) for hypotheses in found.values() for tokens, _ in hypotheses}
    if group["max_tokens"] >= 4 and len(lengths) < 2:
        return None
    return {**group, "found": found}


def num_outcomes(group: dict) -> int:
    """How many different results the ways of stopping give."""
    return len({json.dumps(hypotheses) for hypotheses in group["found"].values()})


def draw(rng, width: int, length_penalty: float, stop_ids: list[int]) -> dict:
    """A group with the rest of its settings drawn; long searches are the likelier ones."""
    max_tokens = int(rng.choice(MAX_TOKENS, p=np.arange(2, 10) / 44))
    few = max_tokens >= 4 and rng.random() < 0.2
    return {
        "width": width,
        "num_return": width if rng.random() < 0.6 else int(rng.integers(1, width + 1)),
        "length_penalty": length_penalty,
        "max_tokens": max_tokens,
        "min_tokens": int(rng.integers(1, 4)) if few else 0,
        "stop_ids": sorted(int(token) for token in rng.choice(stop_ids, int(rng.integers(1, 4)), replace=False)),
    }


def model_groups(name: str) -> list[dict]:
    """A group for each width and length penalty on prompts cut from the checkpoint's golden prompt.

    Of some draws the one is kept in which the ways of stopping differ most.
    """
    model = load(HERE / name)
    whole = np.load(HERE / name / "golden.npz")["prompt"].tolist()
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    likely = {length: likely_tokens(model, whole[:length]) for length in PROMPT_LENGTHS}
    groups = []
    for width, length_penalty in product(WIDTHS, LENGTH_PENALTIES):
        drawn = []
        while len(drawn) < DRAWS:
            length = int(rng.choice(PROMPT_LENGTHS))
            settings = draw(rng, width, length_penalty, likely[length])
            group = searched(model, whole[:length], {"prompt_len": length, **settings})
            drawn += [group] if group else []
        groups.append(max(drawn, key=num_outcomes))
    return groups


def table_groups() -> list[dict]:
    """Groups over random tables; every id may stop, and the widest search asks for more than the vocabulary holds."""
    rng = np.random.default_rng(0)
    groups = []
    while len(groups) < TABLE_GROUPS:
        width, length_penalty = int(rng.choice([2, 3, 5, 8])), float(rng.choice(LENGTH_PENALTIES))
        seed = int(rng.integers(1 << 30))
        prompt = rng.integers(0, TABLE_VOCABULARY, 2).tolist()
        settings = draw(rng, width, length_penalty, list(range(TABLE_VOCABULARY)))
        group = searched(TableModel(seed).eval(), prompt, {"seed": seed, "prompt": prompt, **settings})
        if group:
            groups.append(group)
    return groups


def main(names: list[str]) -> None:
    """Nothing; writes the files of the named sources, or of all."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in names or (*MODELS, "tables"):
        groups = table_groups() if name == "tables" else model_groups(name)
        differ = sum(num_outcomes(group) > 1 for group in groups)
        assert differ >= len(groups) // 5, f"{name}: early_stopping matters in {differ} of {len(groups)} groups only"
        path = HERE / "beams" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text("[\n" + ",\n".join("  " + json.dumps(group) for group in groups) + "\n]\n")
        print(f"{name}: {len(groups)} groups, early_stopping matters in {differ}, {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
