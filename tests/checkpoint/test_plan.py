# SPDX-License-Identifier: Apache-2.0
"""The comparison of specs with a checkpoint: every kind of mismatch is listed, before anything is read."""

import numpy as np
import pytest

from metrale_jax.checkpoint.plan import load_plan
from metrale_jax.checkpoint.source import AbstractTensorSource, TensorInfo
from metrale_jax.core.errors import CheckpointError
from metrale_jax.core.specs import ParamSpec, Source, stacked_rows


class DescribedSource(AbstractTensorSource):
    """Shapes and dtypes alone; reading is an error."""

    def __init__(self, **shapes):
        self._infos = {
            name: info if isinstance(info, TensorInfo) else TensorInfo(info, "bfloat16")
            for name, info in shapes.items()
        }

    def tensors(self):
        return self._infos

    def read(self, name):
        raise AssertionError(f"{name} was read while planning")

    def location(self, name):
        return f"file: {name}"

    def close(self):
        pass


SPECS = {
    "qk": ParamSpec((6, 4), ("heads", "model"), (Source("q", (4, 4)), Source("k", (2, 4))), stacked_rows),
    "layers": [{"norm": ParamSpec((4,), ("model",), (Source("norm", (4,)),))}],
}


def message(ignored=(), **shapes):
    with pytest.raises(CheckpointError) as caught:
        load_plan(SPECS, DescribedSource(**shapes), ignored)
    return str(caught.value)


def test_a_checkpoint_that_fits_is_counted():
    plan = load_plan(SPECS, DescribedSource(q=(4, 4), k=(2, 4), norm=TensorInfo((4,), "float32")))
    assert (plan.num_params, plan.num_bytes, plan.ignored) == (2, 2 * 24 + 16, ())


def test_missing_tensors_are_listed_with_the_shape_they_should_have():
    text = message(q=(4, 4))
    assert "2 tensors are missing: norm [4]; k [2, 4]." in text and "wrong" not in text


def test_an_unexpected_tensor_is_named_unless_a_pattern_matches_it_whole():
    shapes = {"q": (4, 4), "k": (2, 4), "norm": (4,), "inv_freq": (2,)}
    assert "1 tensor is unexpected: file: inv_freq [2]." in message(**shapes)
    assert "inv_freq" in message(ignored=("inv",), **shapes)
    assert load_plan(SPECS, DescribedSource(**shapes), ("rotary", r"inv_.*")).ignored == ("inv_freq",)


def test_a_wrong_shape_tells_found_and_expected():
    assert "file: k is [4, 2], expected [2, 4]" in message(q=(4, 4), k=(4, 2), norm=(4,))


def test_integers_where_floats_are_wanted_are_named():
    assert "1 tensor is not of floating point: file: q is int8" in message(
        q=TensorInfo((4, 4), "int8"), k=(2, 4), norm=(4,)
    )


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_every_floating_dtype_is_accepted(dtype):
    shapes = {name: TensorInfo(shape, dtype) for name, shape in (("q", (4, 4)), ("k", (2, 4)), ("norm", (4,)))}
    assert (
        load_plan(SPECS, DescribedSource(**shapes)).num_bytes
        == 28
        * np.dtype(np.uint8).itemsize
        * {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}[dtype]
    )


def test_all_kinds_of_mismatch_are_told_at_once_and_long_lists_are_cut():
    spare = {f"spare{number}": (1,) for number in range(20)}
    text = message(q=TensorInfo((1, 1), "int32"), norm=(4,), **spare)
    for part in ("1 tensor is missing: k", "20 tensors are unexpected", "and 12 more", "q is [1, 1]", "q is int32"):
        assert part in text
    assert text.count("spare") == 8
