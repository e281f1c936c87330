# SPDX-License-Identifier: Apache-2.0
"""Every format that the gguf package dequantises comes out as it does there, bit for bit."""

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from metrale_jax.checkpoint.gguf_blocks import can_dequantise, dequantise

FORMATS = [
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *(
        "TQ1_0",
        "TQ2_0",
        "MXFP4",
        "IQ2_XXS",
        "IQ2_XS",
        "IQ2_S",
        "IQ3_XXS",
        "IQ3_S",
        "IQ1_S",
        "IQ1_M",
        "IQ4_NL",
        "IQ4_XS",
    ),
]


def decoded(raw, quant_type):
    block_elements, block_bytes = GGML_QUANT_SIZES[quant_type]
    out = np.full(raw.size // block_bytes * block_elements, -7, np.float32)
    with np.errstate(all="ignore"):
        dequantise(raw.reshape(-1), quant_type, out)
    return out


@pytest.mark.parametrize("name", FORMATS)
def test_any_bytes_decode_as_the_gguf_package_decodes_them(name):
    quant_type = GGMLQuantizationType[name]
    block_elements, block_bytes = GGML_QUANT_SIZES[quant_type]
    num_blocks = (1 << 16) // block_elements + 3  # one whole chunk and a short one
    raw = np.random.default_rng(0).integers(0, 256, (1, num_blocks * block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(raw, quant_type).reshape(-1)
    np.testing.assert_array_equal(decoded(raw, quant_type), expected)
    assert can_dequantise(quant_type)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4", "BF16", "F16"])
def test_quantised_values_come_back_within_the_step_of_their_format(name):
    quant_type = GGMLQuantizationType[name]
    values = np.random.default_rng(1).uniform(-1, 1, (4, 512)).astype(np.float32)
    back = decoded(quants.quantize(values, quant_type).view(np.uint8), quant_type).reshape(values.shape)
    step = {"Q8_0": 0.005, "Q5_0": 0.07, "Q5_1": 0.04, "Q4_0": 0.13, "Q4_1": 0.07, "BF16": 0.004, "F16": 5e-4}
    assert np.abs(back - values).max() <= step.get(name, 0.51)


def test_formats_of_activations_only_are_told_apart():
    assert not can_dequantise(GGMLQuantizationType.Q8_K) and not can_dequantise(GGMLQuantizationType.Q8_1)
