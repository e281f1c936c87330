# SPDX-License-Identifier: Apache-2.0
"""Tokenizers read from directories: which files count, and what they add."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from metrale_jax.core.errors import RequestError, TextError
from metrale_jax.text.special_tokens import SpecialTokens
from metrale_jax.text.tokenizer import Tokenizer

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


def write_directory(path: Path, config: dict | None = None, **files: object) -> Path:
    """A directory with a tiny byte-level tokenizer.json, `config` and further JSON `files`."""
    backend = Backend(models.BPE({"a": 0, "b": 1, "<s>": 2, "</s>": 3, "ab": 4, "Ġ": 5}, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    backend.add_special_tokens(["<s>"])
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(path / "tokenizer.json"))
    for name, content in {"tokenizer_config": config, **files}.items():
        if content is not None:
            (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_the_stored_post_processor_frames_a_text_whatever_the_config_says(tmp_path):
    write_directory(tmp_path, {"bos_token": "<s>", "add_bos_token": False, "add_eos_token": True, "eos_token": "</s>"})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("ab") == [2, 4]
    assert tokenizer.encode("ab", add_special_tokens=False) == [4]


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    assert Tokenizer.from_directory(write_directory(tmp_path)).encode("a a a") == [2, 0, 5, 0, 5, 0]


def test_named_tokens_are_special_though_the_file_has_them_as_plain(tmp_path):
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, {"eos_token": "</s>", "pad_token": "<pad>"}))
    assert tokenizer.special_token_ids == {2, 3, 6}
    assert tokenizer.pad_token_id == 6
    assert tokenizer.vocab_size == 7
    assert tokenizer.encode("a</s>b") == [2, 0, 3, 1]
    assert tokenizer.decode([2, 0, 3, 1]) == "ab"
    assert tokenizer.decode([2, 0, 3, 1], skip_special_tokens=False) == "<s>a</s>b"


def test_added_tokens_of_the_config_get_their_ids_in_order(tmp_path):
    added = {"10": {"content": "<z>", "special": False}, "9": {"content": "<y>", "special": True}}
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, {"added_tokens_decoder": added}))
    assert tokenizer.encode("<z><y>", add_special_tokens=False) == [7, 6]
    assert tokenizer.special_token_ids == {2, 6}


def test_legacy_files_are_read_where_the_config_has_no_added_tokens(tmp_path):
    legacy = {"special_tokens_map": {"eos_token": {"content": "<y>"}}, "added_tokens": {"<z>": 7, "<y>": 6}}
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, None, **legacy))
    assert tokenizer.encode("<z><y>", add_special_tokens=False) == [7, 6]
    assert tokenizer.eos_token_ids == (6,)
    assert tokenizer.special_token_ids == {2, 6}


def test_eos_ids_of_the_generation_config_come_after_the_own(tmp_path):
    write_directory(tmp_path, {"eos_token": "</s>"}, generation_config={"eos_token_id": [1, 3]})
    assert Tokenizer.from_directory(tmp_path).eos_token_ids == (3, 1)


def test_extra_tokens_by_name_are_special_and_visible_to_templates(tmp_path):
    config = {"image_token": "<i>", "extra_special_tokens": {"audio_token": "<a>"}}
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, config)).with_chat_template(
        "{{ image_token }}{{ audio_token }}"
    )
    assert tokenizer.special_token_ids == {2, 6, 7}
    assert tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": ""}]), False) == [6, 7]


def test_a_template_file_goes_before_the_config_and_that_before_the_processor(tmp_path):
    messages = [{"role": "user", "content": "x"}]
    write_directory(tmp_path, {"bos_token": "<s>"}, chat_template={"chat_template": "processor"})
    assert Tokenizer.from_directory(tmp_path).apply_chat_template(messages) == "processor"
    write_directory(tmp_path, {"bos_token": "<s>", "chat_template": TEMPLATE})
    assert Tokenizer.from_directory(tmp_path).apply_chat_template(messages) == "<s>x"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_directory(tmp_path).apply_chat_template(messages) == "file"


def test_named_templates_serve_by_tools_and_by_name(tmp_path):
    named = [{"name": name, "template": name} for name in ("default", "tool_use", "rag")]
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, {"chat_template": named}))
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(messages) == "default"
    assert tokenizer.apply_chat_template(messages, tools=[{}]) == "tool_use"
    assert tokenizer.apply_chat_template(messages, chat_template="rag") == "rag"
    assert tokenizer.with_chat_template("own").apply_chat_template(messages) == "own"


@pytest.mark.parametrize(
    ("files", "part"),
    [
        ({}, "has no tokenizer files, and tokenizer.json is needed. Save it"),
        ({"tokenizer.model": ""}, "has only tokenizer.model, and tokenizer.json is needed"),
        ({"tokenizer.json": "{}"}, "tokenizer.json cannot be read"),
    ],
)
def test_a_directory_without_a_usable_tokenizer_is_named_with_a_remedy(tmp_path, files, part):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(TextError, match=part):
        Tokenizer.from_directory(tmp_path)


def test_a_broken_config_is_named(tmp_path):
    write_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1")
    with pytest.raises(TextError, match="tokenizer_config.json is not JSON"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(TextError, match="holds a list where an object is needed"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("text", ["\ud800", 3, None])
def test_a_text_that_is_no_unicode_is_refused(llama, text):
    with pytest.raises(RequestError, match="cannot be encoded"):
        llama.encode(text)


def test_a_backend_without_a_decoder_joins_tokens_by_spaces():
    tokenizer = Tokenizer(Backend(models.WordLevel({"a": 0, "b": 1})), SpecialTokens())
    assert tokenizer.decode([0, 1, 7]) == "a b"
    assert tokenizer.token_bytes(1) == b"b"
    assert tokenizer.token_bytes(7) == b""
    assert tokenizer.eos_token_ids == ()
    assert tokenizer.bos_token_id is None


def test_what_a_config_holds_of_it_is_told_without_writing_it(tmp_path):
    config = {"eos_token": "</s>", "audio_token": "<a>", "extra_special_tokens": {"end": "<e>"}}
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, config))
    assert tokenizer.config == {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    assert tokenizer.default_chat_template is None
    assert tokenizer.with_chat_template(TEMPLATE).default_chat_template == TEMPLATE
