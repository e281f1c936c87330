# SPDX-License-Identifier: Apache-2.0
"""Loading: values, dtypes, transforms, order, memory and the refusal of values that are not finite."""

import threading

import jax
import ml_dtypes
import numpy as np
import pytest

from metrale_jax.checkpoint.place import load_params, read_param, sharded_placer
from metrale_jax.checkpoint.source import AbstractTensorSource, TensorInfo
from metrale_jax.core.errors import CheckpointError
from metrale_jax.core.specs import ParamSpec, Source, identity, stacked_rows

BF16 = np.dtype(ml_dtypes.bfloat16)


class ArraySource(AbstractTensorSource):
    """Arrays in memory, read-only as a mapped file's are."""

    def __init__(self, **arrays):
        self._arrays = arrays
        for array in arrays.values():
            array.flags.writeable = False

    def tensors(self):
        return {name: TensorInfo(array.shape, array.dtype.name) for name, array in self._arrays.items()}

    def read(self, name):
        return self._arrays[name]

    def location(self, name):
        return f"file: {name}"

    def close(self):
        pass


def spec(*names, shape, transform=identity, sources=None, **more):
    sources = sources or [shape] * len(names)
    listed = tuple(Source(name, each) for name, each in zip(names, sources, strict=True))
    return ParamSpec(shape, ("a",) * len(shape), listed, transform, **more)


def random(shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def on_host(array, spec):
    return array


@pytest.mark.parametrize("run", [np.float32, np.float16, BF16], ids=str)
@pytest.mark.parametrize("stored", [np.float64, np.float32, np.float16, BF16, ml_dtypes.float8_e4m3fn], ids=str)
def test_every_stored_dtype_converts_to_every_run_dtype(stored, run):
    weights = random((5, 7), stored)
    read = read_param(spec("w", shape=(5, 7)), ArraySource(w=weights), np.dtype(run))
    assert read.dtype == run and read.flags.c_contiguous
    np.testing.assert_array_equal(read, weights.astype(run))


def test_stacked_sources_of_different_dtypes_land_in_order():
    parts = {"q": random((4, 3)), "k": random((2, 3), BF16, 1), "v": random((2, 3), np.float16, 2)}
    stacked = spec("q", "k", "v", shape=(8, 3), transform=stacked_rows, sources=[(4, 3), (2, 3), (2, 3)])
    read = read_param(stacked, ArraySource(**parts), BF16)
    np.testing.assert_array_equal(read, np.concatenate([part.astype(BF16) for part in parts.values()]))
    assert read.ctypes.data % 64 == 0


def test_a_transform_rounds_once():
    weights = np.array([1 / 512, 3 / 512], BF16)  # one more than each needs nine bits of mantissa
    plus_one = spec("w", shape=(2,), transform=lambda array: array + np.ones((), array.dtype), keep_float32=True)
    assert read_param(plus_one, ArraySource(w=weights), BF16).tolist() == [1 + 1 / 512, 1 + 3 / 512]


def test_a_transposing_transform_gives_a_contiguous_array():
    read = read_param(
        spec("w", shape=(7, 5), sources=[(5, 7)], transform=np.transpose), ArraySource(w=random((5, 7))), BF16
    )
    assert read.flags.c_contiguous and np.array_equal(read, random((5, 7)).T.astype(BF16))


def test_keep_float32_survives_a_narrow_run():
    kept = spec("w", shape=(3,), keep_float32=True)
    assert read_param(kept, ArraySource(w=random((3,))), BF16).dtype == np.float32


def test_the_tree_comes_back_in_its_shape_with_progress_to_the_end():
    arrays = {f"w{number}": random((number + 1, 2), seed=number) for number in range(9)}
    specs = {
        "list": [spec(name, shape=array.shape) for name, array in arrays.items()],
        "pair": (spec("w0", shape=(1, 2)),),
    }
    seen, placed_on = [], set()

    def place(array, spec):
        placed_on.add(threading.current_thread())
        return array

    params = load_params(specs, ArraySource(**arrays), np.float32, place, lambda *done: seen.append(done))
    assert [array.tolist() for array in params["list"]] == [array.tolist() for array in arrays.values()]
    assert params["pair"][0].tolist() == arrays["w0"].tolist()
    total = sum(array.nbytes for array in arrays.values()) + arrays["w0"].nbytes
    assert seen[-1] == (total, total) and seen == sorted(seen) and len(seen) == 10
    assert placed_on == {threading.current_thread()}


def test_no_more_than_the_threads_read_ahead_of_placing():
    class CountingSource(ArraySource):
        reads = 0

        def read(self, name):
            type(self).reads += 1
            return super().read(name)

    source, ahead = CountingSource(w=random((4,))), []

    def place(array, spec):
        ahead.append(source.reads - len(ahead))
        return array

    load_params([spec("w", shape=(4,))] * 30, source, np.float32, place, num_threads=3)
    assert max(ahead) <= 4


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -np.nan])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16, np.float64, ml_dtypes.float8_e5m2], ids=str)
def test_a_value_that_is_not_finite_names_its_tensor(value, dtype):
    good, bad = random((70_000,)).astype(dtype), random((70_000,)).astype(dtype)
    bad[69_999] = value
    both = spec("good", "bad", shape=(140_000,), transform=stacked_rows, sources=[(70_000,)] * 2)
    with pytest.raises(CheckpointError, match="file: bad holds 1 values"):
        load_params([both], ArraySource(good=good, bad=bad), dtype, on_host)


def test_the_largest_finite_values_are_finite():
    for dtype in (np.float16, BF16, np.float32, np.float64):
        edges = np.array([1, -1], dtype) * ml_dtypes.finfo(dtype).max
        assert read_param(spec("w", shape=(2,)), ArraySource(w=edges), np.dtype(dtype)).tolist() == edges.tolist()


def test_a_weight_beyond_the_run_dtype_names_its_tensor_and_the_way_out():
    with pytest.raises(CheckpointError, match=r"file: w has values beyond the range of float16.*bfloat16"):
        read_param(spec("w", shape=(2,)), ArraySource(w=np.array([1.0, 7e4], np.float32)), np.dtype(np.float16))


def test_a_placed_param_is_no_view_of_the_file():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    raw = np.empty(64 + 4096, np.uint8)
    start = -raw.ctypes.data % 64
    mapped = raw[start : start + 4096].view(np.float32)  # aligned: JAX would adopt it
    mapped[:] = 1
    view = mapped[:]
    (param,) = load_params(
        [spec("w", shape=(1024,))], ArraySource(w=view), np.float32, sharded_placer(lambda spec: sharding)
    )
    mapped[:] = 2
    assert param.sharding == sharding and float(param[0]) == 1.0


def test_loading_may_run_on_another_thread():
    result = []
    worker = threading.Thread(
        target=lambda: result.append(
            load_params([spec("w", shape=(3,))], ArraySource(w=random((3,))), np.float32, on_host)
        )
    )
    worker.start()
    worker.join()
    np.testing.assert_array_equal(result[0][0], random((3,)))


def test_an_error_in_placing_stops_the_reading():
    def place(array, spec):
        raise MemoryError("device full")

    before = threading.active_count()
    with pytest.raises(MemoryError):
        load_params([spec("w", shape=(3,))] * 20, ArraySource(w=random((3,))), np.float32, place)
    assert threading.active_count() == before
