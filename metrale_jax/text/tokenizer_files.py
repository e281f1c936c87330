# SPDX-License-Identifier: Apache-2.0
"""Reads the tokenizer files of a checkpoint directory as transformers' fast tokenizers do."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from metrale_jax.core.errors import TextError
from metrale_jax.text.special_tokens import SpecialTokens, ids_of

_SLOW_ONLY_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "tekken.json", "vocab.txt")


def read_tokenizer_directory(directory: Path) -> tuple[Backend, SpecialTokens, dict[str, str]]:
    """The backend, special tokens and chat templates of a directory. Raises `TextError` where one is unusable.

    `tokenizer.json` is needed; `tokenizer_config.json`, `special_tokens_map.json`, `added_tokens.json`, the chat
    template files and `generation_config.json` (further eos ids) are read where present.
    """
    backend = _read_backend(directory)
    config = _read_json(directory / "tokenizer_config.json")
    if "added_tokens_decoder" in config:
        added = [_added_token(token) for _, token in _by_id(config["added_tokens_decoder"])]
    else:
        config |= _read_json(directory / "special_tokens_map.json")
        added = list(_legacy_added_tokens(directory, config))
    special = list(_special_tokens(config))
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in added if repr(token) not in known])
    # A token that is special by name is special whatever flag it was stored with.
    by_content = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens([by_content.get(token.content, token) for token in special])
    return backend, _facts(backend, config, directory), _chat_templates(directory, config)


def _read_backend(directory: Path) -> Backend:
    path = directory / "tokenizer.json"
    if not path.is_file():
        others = [name for name in _SLOW_ONLY_FILES if (directory / name).is_file()]
        found = f"has only {', '.join(others)}" if others else "has no tokenizer files"
        raise TextError(
            f"{directory} {found}, and tokenizer.json is needed. Save it once from transformers with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...), or work with token ids."
        )
    try:
        return Backend.from_file(str(path))
    except Exception as error:
        # The library raises Exception itself, of no class of its own, for whatever it cannot parse.
        if type(error) is not Exception:
            raise
        raise TextError(
            f"{path} cannot be read: {' '.join(str(error).split())}. Download it again, or update tokenizers."
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or an empty one where there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise TextError(f"{path} is not JSON: {error}. Download it again.") from error
    if not isinstance(content, dict):
        raise TextError(f"{path} holds a {type(content).__name__} where an object is needed. Download it again.")
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8 text ({error}). Download it again.") from error
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}. Check its permissions.") from error


def _by_id(tokens: dict[str, Any]) -> list[tuple[int, Any]]:
    return sorted((int(token_id), token) for token_id, token in tokens.items())


def _added_token(stored: str | dict[str, Any], **defaults: bool) -> AddedToken:
    """A token of a config file, which is its text or an object of its properties."""
    if isinstance(stored, str):
        return AddedToken(stored, **defaults)
    fields = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(stored["content"], **(defaults | {name: stored[name] for name in fields if name in stored}))


def _legacy_added_tokens(directory: Path, config: dict[str, Any]) -> Iterator[AddedToken]:
    """The tokens of `added_tokens.json`, in the order of their ids; special where the config names them."""
    special = {token.content for token in _special_tokens(config)}
    stored = _read_json(directory / "added_tokens.json")
    for content, _ in sorted(stored.items(), key=lambda item: item[1]):
        yield AddedToken(content, normalized=content not in special, special=content in special)


def _special_tokens(config: dict[str, Any]) -> Iterator[AddedToken]:
    """Every token that the config marks as special by naming it."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    named = [value for name, value in config.items() if name.endswith("_token") and isinstance(value, str | dict)]
    for value in named + list(extra.values() if isinstance(extra, dict) else extra):
        yield _added_token(value, special=True, normalized=False)


def _facts(backend: Backend, config: dict[str, Any], directory: Path) -> SpecialTokens:
    strings = {
        name: _added_token(value).content
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        strings |= {name: _added_token(value).content for name, value in extra.items()}
    bos, pad, eos = (
        ids_of(backend, [strings[name]] if name in strings else []) for name in ("bos_token", "pad_token", "eos_token")
    )
    generation = _read_json(directory / "generation_config.json").get("eos_token_id")
    further = generation if isinstance(generation, list) else [] if generation is None else [generation]
    return SpecialTokens(
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys([*eos, *further])),
        pad_token_id=pad[0] if pad else None,
        strings=strings,
    )


def _chat_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """The chat templates by name: from files of their own, else the tokenizer's config, else the processor's."""
    named = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if (directory / "chat_template.jinja").is_file():
        named["default"] = directory / "chat_template.jinja"
    if named:
        return {name: _read_text(path) for name, path in named.items()}
    stored = config.get("chat_template") or _read_json(directory / "chat_template.json").get("chat_template") or {}
    if isinstance(stored, str):
        return {"default": stored}
    if isinstance(stored, list):
        return {entry["name"]: entry["template"] for entry in stored}
    return dict(stored)
