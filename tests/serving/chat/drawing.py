# SPDX-License-Identifier: Apache-2.0
"""Answers drawn blindly under a grammar: a model that knows nothing, without a model."""

import random
from functools import lru_cache

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from metrale_jax.text.grammar import GrammarCompiler
from metrale_jax.text.grammar_spec import GrammarSpec
from metrale_jax.text.special_tokens import SpecialTokens
from metrale_jax.text.tokenizer import Tokenizer

END = "</s>"


@lru_cache
def byte_tokenizer(special: tuple[str, ...] = ()) -> Tokenizer:
    """A token for every byte, one that ends answers, and these special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (END, *special)])
    return Tokenizer(backend, SpecialTokens(eos_token_ids=(backend.token_to_id(END),)))


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Its special tokens' ids by their text."""
    return {tokenizer.id_to_token(token): token for token in tokenizer.special_token_ids}


def drawn(grammar: str, tokenizer: Tokenizer, seed: int, begin: str = "", max_tokens: int = 4000) -> str:
    """An answer that begins with `begin` (special tokens spelt out) and goes on by chance, to its end."""
    ends = tokenizer.eos_token_ids
    constraint = _compiler(tokenizer).compile(GrammarSpec("grammar", grammar))
    given = tokenizer.encode(begin, add_special_tokens=False) if begin else []
    chance = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        bits = np.unpackbits(np.ascontiguousarray(constraint.mask()).view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        token = given.pop(0) if given else chance.choice(allowed)
        assert token in allowed, (
            f"{tokenizer.decode(tokens, False)!r} may not go on with {tokenizer.id_to_token(token)!r}"
        )
        if token in ends:
            return tokenizer.decode(tokens, skip_special_tokens=False)
        constraint.accept(token)
        tokens.append(token)
    raise AssertionError(f"no end after {max_tokens} tokens: {tokenizer.decode(tokens, False)[-200:]!r}")


@lru_cache
def _compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
