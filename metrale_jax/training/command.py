# SPDX-License-Identifier: Apache-2.0
"""`train-drafter`: a draft head for a model, trained on the model's own answers, on the command line."""

import argparse
import sys
from pathlib import Path
from typing import Any

from metrale_jax.core.errors import ConfigError
from metrale_jax.flags import add_flags, chosen
from metrale_jax.training.options import TrainOptions

# Enough to keep a CPU's cores in large matrix products, and its memory within a few GB.
MAX_SEQUENCES = 64
KV_CACHE_MIB = 1024


def add_train_drafter(commands: Any, epilog: str) -> None:
    """Nothing; the parser's `commands` have `train-drafter`."""
    text = "train a small drafter for speculative decoding on what the model itself says"
    sub = commands.add_parser("train-drafter", help=text, description=text, epilog=epilog)
    sub.set_defaults(command=_train)
    sub.add_argument("--model", default="smollm2-135m", help="default smollm2-135m")
    sub.add_argument("--output", type=Path, required=True, help="directory of the drafter; an unfinished one goes on")
    sub.add_argument("--cache-dir", type=Path, default=None, help="where models that come in parts are joined")
    sub.add_argument("--kv-cache-mib", type=int, default=KV_CACHE_MIB, help=f"default {KV_CACHE_MIB}")
    sub.add_argument("--max-sequences", type=int, default=MAX_SEQUENCES, help=f"default {MAX_SEQUENCES}")
    sub.add_argument("--quiet", action="store_true", help="no progress")
    add_flags(sub, TrainOptions)


def _train(arguments: argparse.Namespace) -> int:
    options = TrainOptions(**chosen(arguments, TrainOptions))
    try:
        import optax  # noqa: F401
    except ImportError:
        raise ConfigError("optax is not installed, which trains; run pip install 'metrale-jax[train]'.") from None
    from metrale_jax.llm import LLM
    from metrale_jax.progress import TerminalProgress, silent
    from metrale_jax.runtime import default_cache_dir
    from metrale_jax.training.train import train_drafter

    llm = LLM(
        arguments.model,
        progress=not arguments.quiet,
        max_sequences=arguments.max_sequences,
        kv_cache_mib=arguments.kv_cache_mib,
        cache_dir=arguments.cache_dir,
        compile_cache=default_cache_dir() / "programs",
    )
    shown = silent if arguments.quiet else TerminalProgress()
    say = (lambda line: None) if arguments.quiet else (lambda line: print(line, file=sys.stderr, flush=True))
    figures = train_drafter(llm, arguments.output, options, shown, say)
    greedy = figures["held_out"][0]
    print(
        f"{arguments.output} holds a drafter for {arguments.model}: {greedy['right'][0]:.0%} of its first guesses and "
        f"{greedy['tokens_per_step'][options.turns - 1]:.2f} tokens a step at {options.turns} drafts, greedy"
    )
    return 0
