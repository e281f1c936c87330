# SPDX-License-Identifier: Apache-2.0
"""`load_params`: the parameters of a tree of specs, read, transformed, converted and put on devices one by one."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import jax
import ml_dtypes
import numpy as np

from metrale_jax.checkpoint.plan import source_bytes, spec_leaves
from metrale_jax.checkpoint.source import AbstractTensorSource, aligned_empty, named_dtype
from metrale_jax.core.errors import CheckpointError
from metrale_jax.core.specs import ParamSpec, identity, stacked_rows

Place = Callable[[np.ndarray, ParamSpec], jax.Array]
Progress = Callable[[int, int], None]

# Platforms whose devices take an aligned array of the host as it is, without copying it.
ADOPTING = frozenset({"cpu"})
_CHECK_ELEMENTS = 1 << 16
# dtype -> the signed and unsigned integers of its width, and the bits of +infinity and -infinity. As signed integers
# the positive values that are not finite come last, as unsigned ones the negative.
_INFINITIES = {
    np.dtype(np.float64): (np.int64, np.uint64, 0x7FF0_0000_0000_0000, 0xFFF0_0000_0000_0000),
    np.dtype(np.float32): (np.int32, np.uint32, 0x7F80_0000, 0xFF80_0000),
    np.dtype(np.float16): (np.int16, np.uint16, 0x7C00, 0xFC00),
    np.dtype(ml_dtypes.bfloat16): (np.int16, np.uint16, 0x7F80, 0xFF80),
}


def load_params(
    specs,
    source: AbstractTensorSource,
    dtype: np.dtype,
    place: Place,
    progress: Progress | None = None,
    num_threads: int = 2,
):
    """A tree like `specs` of the arrays that `place` made, in `dtype` or float32 where a spec keeps it.

    Call `load_plan` first: what it checks is taken as given here. `place` and `progress(done_bytes, total_bytes)` run
    on the calling thread, in the order of the tree, while `num_threads` others read and convert the next parameters;
    so host memory holds, besides what `place` keeps, at most `num_threads + 1` parameters. `CheckpointError` names a
    tensor whose values are not finite, in the file or once converted.
    """
    leaves, treedef = spec_leaves(specs), jax.tree.structure(specs)
    total = sum(source_bytes(spec, source) for spec in leaves)
    done, arrays = 0, []
    with closing(_read_ahead(leaves, source, np.dtype(dtype), num_threads)) as host_arrays:
        for spec, array in zip(leaves, host_arrays, strict=True):
            arrays.append(place(array, spec))
            done += source_bytes(spec, source)
            if progress is not None:
                progress(done, total)
    return jax.tree.unflatten(treedef, arrays)


def sharded_placer(sharding_of: Callable[[ParamSpec], jax.sharding.Sharding]) -> Place:
    """A `place` that puts each parameter under the sharding of its spec; every process moves its own shards only."""

    def place(array: np.ndarray, spec: ParamSpec) -> jax.Array:
        sharding = sharding_of(spec)
        if not array.flags.writeable and any(device.platform in ADOPTING for device in sharding.addressable_devices):
            # A view of the file must not become a parameter.
            array = _copied(array, array.dtype)
        if sharding.is_fully_addressable and len(sharding.device_set) == 1:
            return jax.device_put(array, sharding)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return place


def read_param(spec: ParamSpec, source: AbstractTensorSource, dtype: np.dtype) -> np.ndarray:
    """The finished host array of one parameter, C-contiguous, in `dtype` or float32 where the spec keeps it.

    A transform computes in the one dtype of file and run, and in float32 where the two differ, so that it rounds once.
    """
    dtype = named_dtype(spec.dtype_in(np.dtype(dtype).name))
    with np.errstate(over="ignore", invalid="ignore"):
        if spec.transform in (identity, stacked_rows):
            # The commonest transforms write straight into the final buffer, conversion included.
            array = aligned_empty(spec.shape, dtype)
            _stack_into(array, spec, source)
        else:
            array = _transformed(spec, [source.read(item.name) for item in spec.sources], dtype)
    assert array.shape == spec.shape, f"{spec.sources}: the transform made {array.shape}, not {spec.shape}"
    if not _all_finite(array):
        raise _not_finite(spec, source, dtype)
    return array


def _stack_into(array: np.ndarray, spec: ParamSpec, source: AbstractTensorSource) -> None:
    row = 0
    if len(spec.sources) > 1:
        array = array.reshape(-1, *spec.sources[0].shape[1:])
    for item in spec.sources:
        # One source may be a scalar; several have rows.
        rows = item.shape[0] if len(spec.sources) > 1 else 0
        source.read_into(item.name, array[row : row + rows] if rows else array)
        row += rows


def _transformed(spec: ParamSpec, arrays: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    coded = any(item.dtype for item in spec.sources)
    if not coded and {array.dtype for array in arrays} != {dtype}:
        arrays = [array.astype(np.float32, copy=False) for array in arrays]
    array = spec.transform(*arrays)
    return array if array.dtype == dtype and array.flags.c_contiguous else _copied(array, dtype)


def _copied(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    out = aligned_empty(array.shape, dtype)
    np.copyto(out, array, casting="unsafe")
    return out


def _all_finite(array: np.ndarray) -> bool:
    """Whether no value is infinite or NaN. Integer maxima over chunks in cache need no scratch."""
    flat = array.reshape(-1)
    if flat.dtype not in _INFINITIES:
        return bool(np.isfinite(flat.astype(np.float32)).all())
    signed, unsigned, positive, negative = _INFINITIES[flat.dtype]
    starts = range(0, flat.size, _CHECK_ELEMENTS)
    return all(
        int(flat[start : start + _CHECK_ELEMENTS].view(signed).max()) < positive
        and int(flat[start : start + _CHECK_ELEMENTS].view(unsigned).max()) < negative
        for start in starts
    )


def _not_finite(spec: ParamSpec, source: AbstractTensorSource, dtype: np.dtype) -> CheckpointError:
    for item in spec.sources:
        array = source.read(item.name)
        if not _all_finite(array):
            count = int((~np.isfinite(array.astype(np.float32))).sum())
            return CheckpointError(
                f"{source.location(item.name)} holds {count} values that are infinite or not numbers. The file is "
                "damaged or "
                "was saved from a failed training run; download it again."
            )
    names = ", ".join(item.name for item in spec.sources)
    return CheckpointError(
        f"{source.location(spec.sources[0].name)} has values beyond the range of {dtype.name}, which would become "
        "infinite "
        f"({names}). Run in bfloat16 or float32."
    )


def _read_ahead(
    specs: Iterable[ParamSpec], source: AbstractTensorSource, dtype: np.dtype, num_threads: int
) -> Iterator[np.ndarray]:
    """The host arrays of `specs` in order, the next `num_threads` being made meanwhile."""
    with ThreadPoolExecutor(num_threads, thread_name_prefix="checkpoint-read") as pool:
        ahead: deque = deque()
        try:
            for spec in specs:
                ahead.append(pool.submit(read_param, spec, source, dtype))
                if len(ahead) > num_threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()
