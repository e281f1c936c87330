# SPDX-License-Identifier: Apache-2.0
"""Dequantisation of GGUF blocks into float32, equal to the gguf package's own bit for bit and several times faster.

The common formats are unpacked here into small integers with a scale (and an offset) for each group. Work goes in
chunks that stay in cache and lands in the caller's buffer. The remaining formats take the package's code, chunk by
chunk. The layouts are those of ggml's `ggml-common.h`.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

# float32 out of one chunk: 256 KiB, which stays in a core's second-level cache.
_CHUNK_ELEMENTS = 1 << 16

# Integers in output order, scale for each group, offset for each group (or None).
Unpacked = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def dequantise(raw: np.ndarray, quant_type: GGMLQuantizationType, out: np.ndarray) -> None:
    """Nothing; `out` (float32, C-contiguous) holds the values of `raw` (uint8, one dimension, whole blocks)."""
    if quant_type in _PLAIN:
        np.copyto(out.reshape(-1), raw.view(_PLAIN[quant_type]))
        return
    block_elements, block_bytes = GGML_QUANT_SIZES[quant_type]
    blocks, flat = raw.reshape(-1, block_bytes), out.reshape(-1)
    unpack = _UNPACK.get(quant_type)
    step = max(1, _CHUNK_ELEMENTS // block_elements)
    for start in range(0, len(blocks), step):
        chunk = blocks[start : start + step]
        target = flat[start * block_elements : (start + len(chunk)) * block_elements]
        if unpack is None:
            target[:] = quants.dequantize(chunk.reshape(1, -1), quant_type).reshape(-1)
        else:
            _scale(unpack(chunk), target)


def can_dequantise(quant_type: GGMLQuantizationType) -> bool:
    """Whether `dequantise` knows the format: a few that GGUF names are only ever used in activations."""
    if quant_type in _PLAIN or quant_type in _UNPACK:
        return True
    block_bytes = GGML_QUANT_SIZES[quant_type][1]
    try:
        quants.dequantize(np.zeros((1, block_bytes), np.uint8), quant_type)
    except NotImplementedError:
        return False
    return True


def _scale(unpacked: Unpacked, target: np.ndarray) -> None:
    numbers, scale, offset = unpacked
    np.copyto(target, numbers.reshape(-1))
    # Full-width factors: a contiguous multiply is twice as fast as a broadcast over groups of 16 or 32.
    target *= np.repeat(scale.reshape(-1), target.size // scale.size)
    if offset is not None:
        target += np.repeat(offset.reshape(-1), target.size // offset.size)


def _halves(chunk: np.ndarray, start: int, count: int) -> np.ndarray:
    """`count` float16 values at byte `start` of each block, as float32 `[blocks, count]`."""
    return np.ascontiguousarray(chunk[:, start : start + 2 * count]).view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray, run: int) -> np.ndarray:
    """4-bit numbers of `[blocks, bytes]`: in each run of bytes all low halves come first, then all high halves."""
    packed = np.ascontiguousarray(packed).reshape(len(packed), -1, run)
    numbers = np.empty((*packed.shape[:2], 2, run), np.uint8)
    np.bitwise_and(packed, 15, out=numbers[:, :, 0])
    np.right_shift(packed, 4, out=numbers[:, :, 1])
    return numbers.reshape(len(packed), -1)


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    """Bit `i` of a little-endian word of 32, as 0 or 16, `[blocks, 32]`."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=1, bitorder="little") << 4


def _q4_0(chunk: np.ndarray) -> Unpacked:
    return _nibbles(chunk[:, 2:], 16).view(np.int8) - np.int8(8), _halves(chunk, 0, 1), None


def _q4_1(chunk: np.ndarray) -> Unpacked:
    scale = _halves(chunk, 0, 2)
    return _nibbles(chunk[:, 4:], 16), scale[:, 0], scale[:, 1]


def _q5_0(chunk: np.ndarray) -> Unpacked:
    numbers = _nibbles(chunk[:, 6:], 16) | _fifth_bits(chunk[:, 2:6])
    return numbers.view(np.int8) - np.int8(16), _halves(chunk, 0, 1), None


def _q5_1(chunk: np.ndarray) -> Unpacked:
    scale = _halves(chunk, 0, 2)
    return _nibbles(chunk[:, 8:], 16) | _fifth_bits(chunk[:, 4:8]), scale[:, 0], scale[:, 1]


def _q8_0(chunk: np.ndarray) -> Unpacked:
    return np.ascontiguousarray(chunk[:, 2:]).view(np.int8), _halves(chunk, 0, 1), None


def _k_scales(chunk: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and offset of the eight groups of a Q4_K or Q5_K block: two float16 times 6-bit numbers in 12 bytes."""
    halves, packed = _halves(chunk, 0, 2), np.ascontiguousarray(chunk[:, 4:16])
    scale, least, mixed = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = np.concatenate([scale & 63, (mixed & 15) | ((scale >> 2) & 48)], axis=1)
    least = np.concatenate([least & 63, (mixed >> 4) | ((least >> 2) & 48)], axis=1)
    return halves[:, :1] * scale.astype(np.float32), -(halves[:, 1:] * least.astype(np.float32))


def _q4_k(chunk: np.ndarray) -> Unpacked:
    return _nibbles(chunk[:, 16:], 32), *_k_scales(chunk)


def _q5_k(chunk: np.ndarray) -> Unpacked:
    high = np.ascontiguousarray(chunk[:, 16:48])[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]
    return _nibbles(chunk[:, 48:], 32) | ((high & 1) << 4).reshape(len(chunk), -1), *_k_scales(chunk)


def _q6_k(chunk: np.ndarray) -> Unpacked:
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = np.ascontiguousarray(chunk[:, 128:192]).reshape(-1, 2, 1, 32) >> shifts
    numbers = _nibbles(chunk[:, :128], 64) | ((high & 3) << 4).reshape(len(chunk), -1)
    scale = np.ascontiguousarray(chunk[:, 192:208]).view(np.int8).astype(np.float32)
    return numbers.view(np.int8) - np.int8(32), _halves(chunk, 208, 1) * scale, None


_PLAIN = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_UNPACK: dict[GGMLQuantizationType, Callable[[np.ndarray], Unpacked]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}
