# SPDX-License-Identifier: Apache-2.0
"""Safetensors directories: what is read equals what was saved, and every fault is named."""

import json
import random

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from metrale_jax.checkpoint.safetensors_source import SafetensorsSource
from metrale_jax.core.errors import CheckpointError

FORMAT_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


def arrays(*names):
    return {name: np.arange(6, dtype=np.float32).reshape(2, 3) + place for place, name in enumerate(names)}


def packed(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(begin, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def sharded(directory, shards, index=None):
    for file, names in shards.items():
        save_file(arrays(*names), directory / file)
    index = {name: file for file, names in shards.items() for name in names} if index is None else index
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def message(path):
    with pytest.raises(CheckpointError) as caught:
        SafetensorsSource(path)
    return str(caught.value)


@pytest.mark.parametrize("dtype", FORMAT_DTYPES)
def test_every_dtype_of_the_format_reads_as_its_numpy_dtype(tmp_path, dtype):
    expected = np.arange(6).reshape(2, 3).astype(FORMAT_DTYPES[dtype])
    data = expected.tobytes()
    (tmp_path / "model.safetensors").write_bytes(packed({"a": entry(0, len(data), (2, 3), dtype)}, data))
    source = SafetensorsSource(tmp_path)
    read = source.read("a")
    assert read.dtype == expected.dtype and read.tobytes() == data and read.shape == (2, 3)
    assert source.tensors()["a"].dtype == expected.dtype.name and source.tensors()["a"].num_bytes == len(data)


def test_a_read_is_a_view_of_the_file_and_outlives_the_source(tmp_path):
    save_file(arrays("a", "b"), tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    read = source.read("b")
    assert not read.flags.owndata and not read.flags.writeable
    source.close()
    np.testing.assert_array_equal(read, arrays("a", "b")["b"])


def test_shards_of_any_name_and_a_single_file_read_alike(tmp_path):
    (tmp_path / "many").mkdir()
    sharded(tmp_path / "many", {"first.safetensors": ["a"], "other-00002-of-00002.safetensors": ["b", "c"]})
    save_file(arrays("a"), tmp_path / "lone.safetensors")
    many = SafetensorsSource(tmp_path / "many")
    assert set(many.tensors()) == {"a", "b", "c"}
    np.testing.assert_array_equal(many.read("c"), arrays("b", "c")["c"])
    for path in (tmp_path, tmp_path / "lone.safetensors"):
        np.testing.assert_array_equal(SafetensorsSource(path).read("a"), arrays("a")["a"])
    assert "other-00002-of-00002.safetensors: c" in many.location("c")


def test_empty_tensors_and_scalars_read(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(
        packed({"__metadata__": {"format": "pt"}, "none": entry(0, 0, (0, 4)), "one": entry(0, 4, ())}, b"\0\0\x80\x3f")
    )
    source = SafetensorsSource(tmp_path)
    assert source.read("none").shape == (0, 4) and source.read("one") == np.float32(1)


def test_a_missing_shard_is_named(tmp_path):
    sharded(tmp_path, {"x-1.safetensors": ["a"], "x-2.safetensors": ["b"]})
    (tmp_path / "x-2.safetensors").unlink()
    assert "lacks 1 of the 2 files" in (text := message(tmp_path)) and "x-2.safetensors" in text


def test_a_tensor_that_only_the_index_knows_is_named(tmp_path):
    sharded(tmp_path, {"s.safetensors": ["a"]}, {"a": "s.safetensors", "ghost": "s.safetensors"})
    assert "s.safetensors lacks 1 of the 2 tensors" in (text := message(tmp_path)) and "ghost" in text


def test_a_tensor_that_only_the_shard_knows_is_named(tmp_path):
    sharded(tmp_path, {"s.safetensors": ["a", "spare"]}, {"a": "s.safetensors"})
    assert "s.safetensors holds 1 tensors that" in (text := message(tmp_path)) and "spare" in text


def test_a_shard_that_the_index_does_not_name_is_named(tmp_path):
    sharded(tmp_path, {"m-00001-of-00002.safetensors": ["a"]})
    save_file(arrays("b"), tmp_path / "m-00002-of-00002.safetensors")
    assert "m-00002-of-00002.safetensors" in message(tmp_path)


def test_a_file_beside_the_shards_that_is_no_shard_is_left_alone(tmp_path):
    sharded(tmp_path, {"m-00001-of-00001.safetensors": ["a"]})
    save_file(arrays("b"), tmp_path / "consolidated.safetensors")
    assert set(SafetensorsSource(tmp_path).tensors()) == {"a"}


def test_shards_without_an_index_are_refused(tmp_path):
    save_file(arrays("a"), tmp_path / "m-00001-of-00002.safetensors")
    assert "no model.safetensors.index.json" in message(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../b"}}', "\xff"])
def test_a_broken_index_is_named(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    assert "model.safetensors.index.json" in message(tmp_path)


def test_pickled_weights_are_to_be_converted(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin" in (text := message(tmp_path)) and "Convert them to safetensors" in text


def test_an_empty_directory_and_a_path_that_is_not_there_are_named(tmp_path):
    assert f"{tmp_path} holds no weights" in message(tmp_path)
    assert "does not exist" in message(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("header", "data", "expected"),
    [
        (b"{not json", b"", "not JSON"),
        (b"[" * 100_000, b"", "not JSON"),
        (b"[1]", b"", "not a JSON object"),
        (b'{"a": 1, "a": 2}', b"", "'a' twice"),
        ({"a": 5}, b"", "'a'"),
        ({"a": entry(0, 8, dtype="F4")}, b"8bytes..", "'F4'"),
        ({"a": entry(0, 8, dtype=["F32"])}, b"8bytes..", "'a'"),
        ({"a": entry(0, 8, [-2])}, b"8bytes..", "'a'"),
        ({"a": entry(0, 8, [2.0])}, b"8bytes..", "'a'"),
        ({"a": entry(0, 4)}, b"4byt", "4 bytes where it needs 8"),
        ({"a": entry(8, 0)}, b"8bytes..", "-8 bytes where it needs 8"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, b"12 bytes....", "overlaps"),
        ({"a": entry(0, 8), "b": entry(12, 20)}, b"x" * 20, "leaves a gap"),
        ({"a": entry(0, 8)}, b"7 bytes", "cut short from tensor 'a'"),
        ({"a": entry(0, 8)}, b"9 bytes..", "belongs to no tensor"),
    ],
)
def test_an_untrue_header_is_refused_with_what_is_wrong(tmp_path, header, data, expected):
    file = tmp_path / "model.safetensors"
    file.write_bytes(packed(header, data))
    assert expected in (text := message(tmp_path)) and str(file) in text


def test_a_file_cut_anywhere_is_refused(tmp_path):
    save_file(arrays("a", "b"), tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "cut.safetensors").write_bytes(whole[:size])
        assert "cut.safetensors" in message(tmp_path / "cut.safetensors")


def test_damaged_headers_are_refused_or_still_agree_with_the_file(tmp_path):
    save_file(arrays("a", "b"), tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    header_end, rng, refused = 8 + int.from_bytes(whole[:8], "little"), random.Random(0), 0
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[rng.randrange(header_end)] = rng.randrange(256)
        (tmp_path / "damaged.safetensors").write_bytes(damaged)
        try:
            source = SafetensorsSource(tmp_path / "damaged.safetensors")
        except CheckpointError:
            refused += 1
            continue
        assert sum(source.read(name).nbytes for name in source.tensors()) == len(whole) - header_end
    assert refused > 200
