# SPDX-License-Identifier: Apache-2.0
"""GGUF tensors under Hugging Face names: mapping, dequantising and undoing what the converter did."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants

from metrale_jax.checkpoint.gguf_file import open_gguf
from metrale_jax.checkpoint.gguf_source import GgufSource, gguf_names
from metrale_jax.checkpoint.packaged import ALIASES, packaged_file
from metrale_jax.core.errors import CheckpointError, ModelNotFoundError
from metrale_jax.models.gguf_rules import unpermuted_heads


def permuted(weights, num_heads):
    """What llama.cpp's converter does to q and k (`LlamaModel.permute`)."""
    shape = weights.shape
    return weights.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def saved(path, tensors):
    """A GGUF of name -> (float32 array, format)."""
    writer = GGUFWriter(path, "llama")
    for name, (array, quant_type) in tensors.items():
        data = array if quant_type is None else quants.quantize(array, quant_type)
        writer.add_tensor(name, data, raw_dtype=quant_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_gguf(path)


@pytest.mark.parametrize("shape", [(24,), (24, 5)], ids=["bias", "weight"])
def test_unpermuting_rows_undoes_the_converters_permutation(shape):
    weights = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    changed = permuted(weights, 3)
    assert not np.array_equal(changed, weights)
    np.testing.assert_array_equal(unpermuted_heads(3)(changed), weights)


def test_a_mapped_tensor_reads_under_its_hub_name_with_the_change_undone(tmp_path):
    weights = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    file = saved(
        tmp_path / "m.gguf",
        {
            "blk.0.attn_q.weight": (permuted(weights, 2), GGMLQuantizationType.F16),
            "output_norm.weight": (weights[0] + 1, None),
            "spare.weight": (weights, GGMLQuantizationType.Q8_0),
        },
    )
    names = {"q": "blk.0.attn_q.weight", "norm": "output_norm.weight", "absent": "blk.7.attn_q.weight"}
    source = GgufSource(file, names, {"q": unpermuted_heads(2), "norm": lambda array: array - 1})
    assert set(source.tensors()) == {"q", "norm", "spare.weight"}
    assert source.tensors()["q"].shape == (8, 64) and source.tensors()["q"].dtype == "float32"
    np.testing.assert_array_equal(source.read("q"), weights.astype(np.float16).astype(np.float32))
    np.testing.assert_allclose(source.read("norm"), weights[0], atol=1e-6)
    np.testing.assert_allclose(source.read("spare.weight"), weights, atol=0.02)
    assert source.location("q").endswith("m.gguf: blk.0.attn_q.weight")


def test_integers_and_float64_read_as_stored(tmp_path):
    expected = {"ids": np.arange(5, dtype=np.int32), "wide": np.arange(4, dtype=np.float64) / 3}
    file = saved(tmp_path / "m.gguf", {name: (array, None) for name, array in expected.items()})
    source = GgufSource(file, {}, {})
    for name, array in expected.items():
        assert source.tensors()[name].dtype == array.dtype.name
        np.testing.assert_array_equal(source.read(name), array)


def test_a_format_that_cannot_be_dequantised_names_the_tensor(tmp_path):
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("a.weight", np.zeros((1, 292), np.uint8), raw_dtype=GGMLQuantizationType.Q8_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"'a.weight' as Q8_K"):
        GgufSource(open_gguf(path), {}, {})


def test_hub_names_map_by_the_gguf_packages_own_table():
    wanted = [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.1.post_attention_layernorm.weight",
        "lm_head.weight",
        "model.layers.2.self_attn.q_proj.weight",
        "no.such.weight",
    ]
    assert gguf_names(wanted, "llama", 2) == {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.1.self_attn.q_proj.bias": "blk.1.attn_q.bias",
        "model.layers.1.post_attention_layernorm.weight": "blk.1.ffn_norm.weight",
        "lm_head.weight": "output.weight",
    }
    # The same Hugging Face name means another tensor where a norm follows attention as well.
    gemma = gguf_names(["model.layers.0.post_attention_layernorm.weight"], "gemma3", 1)
    assert gemma == {"model.layers.0.post_attention_layernorm.weight": "blk.0.post_attention_norm.weight"}
    router = "model.layers.0.mlp.gate.e_score_correction_bias"
    assert gguf_names([router], "deepseek2", 1) == {router: "blk.0.exp_probs_b.bias"}


def test_an_architecture_without_a_table_is_named():
    with pytest.raises(CheckpointError, match="architecture='metrale'"):
        gguf_names(["a"], "metrale", 1)


@pytest.mark.parametrize("alias", ALIASES)
def test_every_tensor_of_a_packaged_model_reads_as_the_gguf_package_reads_it(alias, tmp_path_factory):
    try:
        path: Path = packaged_file(alias, ALIASES[alias], tmp_path_factory.mktemp("models"))
    except ModelNotFoundError:
        pytest.skip("the packaged model is not installed")
    file = open_gguf(path)
    source = GgufSource(file, {}, {})
    for name, tensor in file.tensors.items():
        row_bytes = tensor.shape[-1] // GGML_QUANT_SIZES[tensor.quant_type][0] * GGML_QUANT_SIZES[tensor.quant_type][1]
        expected = quants.dequantize(file.raw(name).reshape(-1, row_bytes), tensor.quant_type).reshape(tensor.shape)
        assert np.array_equal(source.read(name), expected), name
