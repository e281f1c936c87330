# SPDX-License-Identifier: Apache-2.0
"""`RunOptions`: how a model is to run, and what is chosen where the options leave it open."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from metrale_jax.core.config import ModelConfig
from metrale_jax.core.errors import ConfigError
from metrale_jax.core.option_types import refuse_wrong_types
from metrale_jax.sampling.accept import acceptance_rule
from metrale_jax.state.formats import StateFormats
from pallas_kernels.kv_formats.registry import FORMATS
from pallas_kernels.paged_attention.op import IMPLEMENTATIONS
from pallas_kernels.state_rows import CHUNK

LOG = logging.getLogger(__name__)

PLATFORM_NAMES = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "tpu": "tpu"}
DTYPES = ("float32", "bfloat16", "float16")
# What weights, activations and the KV cache are in where the checkpoint's own would not do. XLA's CPU compiler converts
# narrow weights at every use, and writes to narrow floats by converting the whole pool to float32 and back.
RUN_DTYPES: Mapping[str, str] = MappingProxyType({"cpu": "float32"})
# Tokens of a KV block on each platform. A TPU's kernel copies whole blocks, of which small ones leave its memory idle,
# and scales of rows are padded to 128 tokens there. Where rows are read one by one, small blocks waste least.
BLOCK_TOKENS: Mapping[str, int] = MappingProxyType({"cpu": 16, "cuda": 16, "tpu": 64})


@dataclass(frozen=True)
class RunOptions:
    """How a model is to run; None leaves the choice to the model or the device.

    `dtype` is that of weights and activations: float32 on a CPU, which converts narrower weights at every use, and the
    checkpoint's own elsewhere. `kv_dtype` is the format of the KV cache (a name of
    `pallas_kernels.kv_formats.registry`), by default that of the activations. `block_size` is tokens a KV block, by
    default what suits the platform (`BLOCK_TOKENS`). `attention` names an implementation of paged attention; "auto" is
    the platform's own. `state_dtype` is that of recurrent state, which gathers rounding errors for as long as its
    sequence; in 16 bits it is rounded wherever a step ends, so that an answer may depend on how its prompt was cut and
    on drafts, and `num_pending` how many drafted tokens it can keep until they are judged. `state_max_norm` above 0
    keeps it from blowing up in very long prompts: after every `state_norm_tokens` tokens of a sequence each head's
    matrix is scaled down to that Frobenius norm, if it is above it. That is another model's answer, if the same however
    it is cut.
    `proposer` (a name of `speculative.registry`) drafts up to `num_drafts` tokens at a time, which changes no answer;
    `drafter` is the model, directory or hub id that has its weights, where it needs any of its own. A head stops
    drafting where it gives no token a probability of `draft_confidence`, and `draft_layer_ids` are the layers, from 0
    on, that a model keeps to draft for itself; both are for proposers that have a use for them. By the rule
    `acceptance`, if it is not "exact", answers are others: it is for research (see `sampling.accept`).
    """

    dtype: str | None = None
    kv_dtype: str | None = None
    block_size: int | None = None
    max_context_tokens: int | None = None
    attention: str = "auto"
    state_dtype: str = "float32"
    num_pending: int = 0
    state_max_norm: float = 0.0
    state_norm_tokens: int = 4096
    proposer: str | None = None
    drafter: str | Path | None = None
    num_drafts: int | None = None
    draft_confidence: float = 0.0
    draft_layer_ids: tuple[int, ...] | list[int] | None = None
    acceptance: str = "exact"

    def __post_init__(self):
        refuse_wrong_types(self)


DEFAULTS = RunOptions()


def chosen_dtype(dtype: str | None, default: str) -> str:
    """The name of a dtype to run in, `default` where none is asked for. Raises `ConfigError` for others."""
    name = dtype or default
    name = np.dtype(name).name if isinstance(name, type) else str(name)
    if name not in DTYPES:
        raise ConfigError(f"dtype={name!r} is not one of {', '.join(DTYPES)}; choose one, or None for the default.")
    return name


def chosen_kv_format(kv_dtype: str | None, default: str) -> str:
    """The name of a format for keys and values, `default` where none is asked for. Raises `ConfigError` for others."""
    name = str(kv_dtype or default)
    if name not in FORMATS:
        raise ConfigError(f"kv_dtype={name!r} is not one of {', '.join(FORMATS)}; choose one, or None for the default.")
    return name


def chosen_block_size(block_size: int | None, platform: str) -> int:
    """Tokens of a KV block, the platform's own where none are asked for."""
    return BLOCK_TOKENS[platform] if block_size is None else block_size


def chosen_attention(name: str) -> str:
    """The name of an implementation of paged attention. Raises `ConfigError` with the list for one unknown."""
    known = ("auto", *(row.name for row in IMPLEMENTATIONS))
    if name not in known:
        raise ConfigError(f"attention={name!r} is not one of {', '.join(known)}; choose one.")
    return name


def chosen_acceptance(name: str, proposer: bool) -> str:
    """The name of a rule by which drafts are accepted; warns of what it changes. Raises `ConfigError` for others, and
    for one that is asked for without a `proposer`."""
    rule = acceptance_rule(name)
    if rule.name != "exact" and not proposer:
        raise ConfigError(f"acceptance={name!r} is for drafts, and no proposer is chosen; name one as proposer.")
    if rule.warning:
        LOG.warning("%s", rule.warning)
    return rule.name


def chosen_formats(options: RunOptions, platform: str, stored: str) -> tuple[str, StateFormats]:
    """The dtype to run in on a platform, `stored` being the checkpoint's own, and the formats of layers' state."""
    name = chosen_dtype(options.dtype, RUN_DTYPES.get(platform, stored))
    keys = chosen_kv_format(options.kv_dtype, RUN_DTYPES.get(platform, name))
    if options.state_dtype not in DTYPES:
        raise ConfigError(f"state_dtype={options.state_dtype!r} is not one of {', '.join(DTYPES)}; choose one.")
    norm, tokens = options.state_max_norm, options.state_norm_tokens
    if isinstance(norm, bool) or not isinstance(norm, int | float) or not 0 <= norm < float("inf"):
        raise ConfigError(f"state_max_norm={norm!r} is not a number from 0; give a Frobenius norm, or 0 for none.")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1 or tokens % CHUNK:
        raise ConfigError(
            f"state_norm_tokens={tokens!r} is not a multiple of {CHUNK}, which recurrent kernels scan by; use "
            f"{CHUNK} or a multiple."
        )
    limits = (float(norm), tokens) if norm else (0.0, 0)
    return name, StateFormats(keys, name, options.state_dtype, options.num_pending, *limits)


def bounded(config: ModelConfig, max_context_tokens: int | None) -> ModelConfig:
    """The config with a shorter context, or as it is for None. Raises `ConfigError` for a length out of range."""
    limit = config.max_context_tokens
    if max_context_tokens is None:
        return config
    if isinstance(max_context_tokens, bool) or not isinstance(max_context_tokens, int) or max_context_tokens < 2:
        raise ConfigError(f"max_context_tokens={max_context_tokens!r} is not an integer above 1; give a length.")
    if max_context_tokens > limit:
        raise ConfigError(
            f"max_context_tokens={max_context_tokens} is above the model's {limit}; ask for at most that many."
        )
    return replace(config, max_context_tokens=max_context_tokens)
