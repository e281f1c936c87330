# SPDX-License-Identifier: Apache-2.0
"""The kernels of recurrent layers and of mixtures of experts that are compiled for machines that are not here."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.static.row import LAYER, LAYERS, Row, placed
from pallas_kernels.activations import Activation
from pallas_kernels.causal_conv1d.cases import SIZES as CONV_SIZES
from pallas_kernels.causal_conv1d.op import conv_ragged, conv_rows
from pallas_kernels.gated_delta.op import DeltaTokens, delta_ragged, delta_rows
from pallas_kernels.grouped_matmul.cases import CLAMPED, MODELS, SWIGLU
from pallas_kernels.grouped_matmul.op import grouped_matmul
from pallas_kernels.shapes import ceil_div, next_power_of_two
from pallas_kernels.ssd.op import SsdHeads, SsdStorage, SsdTokens, ssd_ragged, ssd_rows
from pallas_kernels.state_rows import CHUNK, StateRows, cut_chunks


def _of(*shape: int, dtype: Any = "int32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _slots(state_size: int) -> int:
    """As many slots as take more than 2^32 numbers, so that offsets take more than 32 bits, as on a real machine."""
    return next_power_of_two(ceil_div((1 << 32) + 1, LAYERS * state_size))


def _state_rows(num_sequences: int, width: int) -> StateRows:
    return StateRows(*(_of(num_sequences) for _ in range(5)), width)


@dataclass(frozen=True)
class DeltaSizes:
    """Equal rows of `width` tokens; of `slots`, 0 for as many as a real machine's, each has room for `room` pending."""

    key_heads: int
    heads: int
    rows: int
    columns: int
    per_channel: bool = False
    num_sequences: int = 64
    width: int = 1
    room: int = 0
    slots: int = 0

    @property
    def words(self) -> list[str]:
        """Name the sizes."""
        heads = f"N{self.key_heads}-V{self.heads}-H{self.rows}-Hv{self.columns}"
        return [heads + "-by-channel" * self.per_channel, f"S{self.num_sequences}", f"Q{self.width}-J{self.room}"]

    @property
    def state_size(self) -> int:
        """Numbers of a sequence's states."""
        return self.heads * self.rows * self.columns

    @property
    def token(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of a token's keys, values, decays and strengths."""
        decays = (self.heads, self.rows) if self.per_channel else (self.heads,)
        return (self.key_heads, self.rows), (self.heads, self.columns), decays, (self.heads,)


def delta_storage(row: Row) -> tuple[jax.ShapeDtypeStruct, Any]:
    """States and pending tokens."""
    sizes = row.sizes
    slots = LAYERS, sizes.slots or _slots(sizes.state_size)
    matrix = _of(*slots, sizes.heads, sizes.rows, sizes.columns, dtype=row.kv_format)
    if not sizes.room:
        return matrix, ()
    return matrix, DeltaTokens(*(_of(*slots, sizes.room, *shape, dtype="float32") for shape in sizes.token))


def _delta(row: Row, sharding: Any):
    sizes = row.sizes
    before = sizes.num_sequences, sizes.width
    dtypes = row.dtype, row.dtype, "float32", "float32"
    tokens = DeltaTokens(*(_of(*before, *shape, dtype=dtype) for shape, dtype in zip(sizes.token, dtypes, strict=True)))
    q = _of(*before, sizes.key_heads, sizes.rows, dtype=row.dtype)

    def call(storage, q, tokens, rows):
        return delta_rows(q, tokens, *storage, LAYER, rows, row.platform, row.impl)

    return call, placed((delta_storage(row), q, tokens, _state_rows(*before)), sharding)


def _delta_ragged(row: Row, sharding: Any):
    """Ragged rows, `width` tokens of all sequences together. A step cuts its chunks once for all layers."""
    sizes = row.sizes
    dtypes = row.dtype, row.dtype, "float32", "float32"
    shapes = zip(sizes.token, dtypes, strict=True)
    tokens = DeltaTokens(*(_of(sizes.width, *shape, dtype=dtype) for shape, dtype in shapes))
    q = _of(sizes.width, sizes.key_heads, sizes.rows, dtype=row.dtype)
    rows = _state_rows(sizes.num_sequences, 0)
    rows = rows.replace(chunks=jax.eval_shape(partial(cut_chunks, num_tokens=sizes.width, size=CHUNK), rows))

    def call(storage, q, tokens, rows):
        out, matrix = delta_ragged(q, tokens, *storage, LAYER, rows, row.platform, row.impl)
        return out, (matrix, storage[1])

    return call, placed((delta_storage(row), q, tokens, rows), sharding)


@dataclass(frozen=True)
class SsdSizes:
    """Equal rows of `width` tokens; of `slots`, 0 for as many as a real machine's, each has room for `room` pending."""

    num_heads: int
    num_groups: int
    head_dim: int
    state_dim: int
    num_sequences: int = 64
    width: int = 1
    room: int = 0
    slots: int = 0

    @property
    def words(self) -> list[str]:
        """Name the sizes."""
        heads = f"N{self.num_heads}-K{self.num_groups}-H{self.head_dim}-Z{self.state_dim}"
        return [heads, f"S{self.num_sequences}", f"Q{self.width}-J{self.room}"]

    @property
    def state_size(self) -> int:
        """Numbers of a sequence's states."""
        return self.num_heads * self.head_dim * self.state_dim

    @property
    def token(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of a token's x, dt and b."""
        return (self.num_heads, self.head_dim), (self.num_heads,), (self.num_groups, self.state_dim)


def ssd_storage(row: Row) -> SsdStorage:
    """States and pending rows."""
    sizes = row.sizes
    slots = LAYERS, sizes.slots or _slots(sizes.state_size)
    matrix = _of(*slots, sizes.num_heads, sizes.head_dim, sizes.state_dim, dtype=row.kv_format)
    pending = tuple(_of(*slots, sizes.room, *shape, dtype="float32") for shape in sizes.token)
    return SsdStorage(matrix, pending if sizes.room else ())


def _ssd(row: Row, sharding: Any):
    sizes = row.sizes
    count = sizes.num_sequences * sizes.width
    x, dt, b = sizes.token
    dtypes = row.dtype, "float32", row.dtype, row.dtype
    tokens = SsdTokens(*(_of(count, *shape, dtype=kind) for shape, kind in zip((x, dt, b, b), dtypes, strict=True)))
    heads = SsdHeads(*(_of(sizes.num_heads, dtype="float32") for _ in range(2)))

    def call(storage, tokens, heads, rows):
        return ssd_rows(tokens, heads, storage, LAYER, rows, row.platform, row.impl)

    return call, placed((ssd_storage(row), tokens, heads, _state_rows(sizes.num_sequences, sizes.width)), sharding)


@dataclass(frozen=True)
class SsdRaggedSizes(SsdSizes):
    """Ragged rows of `width` tokens together."""

    @property
    def words(self) -> list[str]:
        """Name the sizes."""
        heads, sequences, _ = super().words
        return [heads, sequences, f"T{self.width}-J{self.room}"]


def _ssd_ragged(row: Row, sharding: Any):
    sizes = row.sizes
    x, dt, b = sizes.token
    dtypes = row.dtype, "float32", row.dtype, row.dtype
    tokens = (_of(sizes.width, *shape, dtype=kind) for shape, kind in zip((x, dt, b, b), dtypes, strict=True))
    heads = SsdHeads(*(_of(sizes.num_heads, dtype="float32") for _ in range(2)))
    rows = _state_rows(sizes.num_sequences, 0)
    # A step cuts its chunks once for all layers.
    rows = rows.replace(chunks=jax.eval_shape(lambda rows: cut_chunks(rows, sizes.width, CHUNK), rows))

    def call(storage, tokens, heads, rows):
        return ssd_ragged(tokens, heads, storage, LAYER, rows, row.platform, row.impl)

    return call, placed((ssd_storage(row), SsdTokens(*tokens), heads, rows), sharding)


@dataclass(frozen=True)
class ConvSizes:
    """Equal rows of `width` tokens; of `slots`, 0 for as many as a real machine's, each has room for `room` pending."""

    channels: int
    taps: int
    num_sequences: int = 64
    width: int = 1
    room: int = 0
    slots: int = 0

    @property
    def words(self) -> list[str]:
        """Name the sizes."""
        return [f"C{self.channels}-W{self.taps}", f"S{self.num_sequences}", f"Q{self.width}-J{self.room}"]


def conv_storage(row: Row) -> tuple[jax.ShapeDtypeStruct, Any]:
    """Tails and pending inputs."""
    sizes = row.sizes
    slots = LAYERS, sizes.slots or _slots((sizes.taps - 1) * sizes.channels)
    pending = _of(*slots, sizes.room, sizes.channels, dtype=row.kv_format) if sizes.room else ()
    return _of(*slots, sizes.taps - 1, sizes.channels, dtype=row.kv_format), pending


def _conv(row: Row, sharding: Any):
    sizes = row.sizes
    x = _of(sizes.num_sequences, sizes.width, sizes.channels, dtype=row.dtype)
    weight, bias = _of(sizes.taps, sizes.channels, dtype=row.dtype), _of(sizes.channels, dtype=row.dtype)

    def call(storage, x, weight, bias, rows):
        return conv_rows(x, weight, bias, *storage, LAYER, rows, True, row.platform, row.impl)

    return call, placed((conv_storage(row), x, weight, bias, _state_rows(sizes.num_sequences, sizes.width)), sharding)


@dataclass(frozen=True)
class ConvRaggedSizes(ConvSizes):
    """Ragged rows of `width` tokens together."""

    @property
    def words(self) -> list[str]:
        """Name the sizes."""
        channels, sequences, _ = super().words
        return [channels, sequences, f"T{self.width}-J{self.room}"]


def _conv_ragged(row: Row, sharding: Any):
    sizes = row.sizes
    x = _of(sizes.width, sizes.channels, dtype=row.dtype)
    weight, bias = _of(sizes.taps, sizes.channels, dtype=row.dtype), _of(sizes.channels, dtype=row.dtype)

    def call(storage, x, weight, bias, rows):
        out, tail = conv_ragged(x, weight, bias, *storage, LAYER, rows, True, row.platform, row.impl)
        return out, tail, storage[1]

    return call, placed((conv_storage(row), x, weight, bias, _state_rows(sizes.num_sequences, 0)), sharding)


@dataclass(frozen=True)
class ExpertSizes:
    """`num_rows` rows of all groups together; `width` counts a weight's outputs, a gate's and up's together."""

    num_rows: int
    experts: int
    width: int
    depth: int
    activation: Activation | None = None
    bias: bool = False

    @property
    def words(self) -> list[str]:
        """Name the sizes."""
        what = [self.activation.name + "-gated" * self.activation.gated] if self.activation else []
        return [f"E{self.experts}-F{self.width}-D{self.depth}", f"T{self.num_rows}", *what, *(["bias"] * self.bias)]

    @property
    def out_width(self) -> int:
        """Outputs of a row."""
        return self.width // 2 if self.activation and self.activation.gated else self.width


def _experts(row: Row, sharding: Any):
    sizes = row.sizes
    weights = _of(sizes.experts, sizes.width, sizes.depth, dtype=row.kv_format)
    bias = _of(sizes.experts, sizes.width, dtype=row.kv_format) if sizes.bias else ()
    x = _of(sizes.num_rows, sizes.depth, dtype=row.dtype)

    def call(x, weights, group_sizes, bias):
        return grouped_matmul(x, weights, group_sizes, row.platform, bias, sizes.activation, row.impl)

    return call, placed((x, weights, _of(sizes.experts), bias), sharding)


ENTRIES: Mapping[str, Callable] = MappingProxyType(
    {
        "gated_delta": _delta,
        "gated_delta_ragged": _delta_ragged,
        "ssd_rows": _ssd,
        "ssd_ragged": _ssd_ragged,
        "conv_rows": _conv,
        "conv_ragged": _conv_ragged,
        "grouped_matmul": _experts,
    }
)
# Storage of entries that hold states, which their calls write over.
WRITING: Mapping[str, Callable] = MappingProxyType(
    {
        "gated_delta": delta_storage,
        "gated_delta_ragged": delta_storage,
        "ssd_rows": ssd_storage,
        "ssd_ragged": ssd_storage,
        "conv_rows": conv_storage,
        "conv_ragged": conv_storage,
    }
)

QWEN3_NEXT, OLMO_HYBRID = (16, 32, 128, 128), (30, 30, 96, 192)
KIMI_LINEAR, NARROW = (32, 32, 128, 128, True), (4, 8, 64, 64)
MAMBA2, NEMOTRON_H, FALCON_H1 = (80, 1, 64, 128), (112, 8, 80, 128), (128, 1, 64, 256)
# Programs beside the kernel zero the states of sequences that begin, or widen tokens, and move what is pending: it is
# gathered for the kernel, and stored with what was there. As they are counted, caches have none of it.
STATES = MappingProxyType({"min_blocks": 2, "tensor_cores": False})
DRAFTS_MOST_BYTES = 1.15
STATE_KINDS = (
    ("gated_delta", DeltaSizes, QWEN3_NEXT, (OLMO_HYBRID, KIMI_LINEAR), "float32", (2, 8, 12)),
    ("ssd_rows", SsdSizes, MAMBA2, (NEMOTRON_H, FALCON_H1), "bfloat16", (5, 7, 10)),
)
FLOATS = ("float32", "bfloat16", "float16")


def _state_rows_of_models() -> Iterator[Row]:
    """What models decode with, both sizes of batch, every dtype at the usual one, and drafts."""
    for entry, kind, usual, others, token, (alone, waiting, drafting) in STATE_KINDS:

        def row(dtype, kept, sizes, most, quick=False, entry=entry, **more):
            return Row(entry, "triton", "cuda", dtype, kept, sizes, quick, max_kernels=most, **STATES, **more)

        for dtype in FLOATS:
            for kept in FLOATS:
                yield row(dtype, kept, kind(*usual), alone, (dtype, kept) == (token, "float32"))
        for heads in others:
            for kept in ("float32", "bfloat16"):
                yield row(token, kept, kind(*heads), alone)
        yield row(token, "float32", kind(*usual, num_sequences=8), alone)
        yield row(token, "float32", kind(*usual, num_sequences=8, room=3), waiting)
        for heads in (usual, others[-1]):
            drafts = kind(*heads, width=4, room=3)
            yield row(token, "float32", drafts, drafting, most_bytes=DRAFTS_MOST_BYTES)


# A TPU loads no float16; its memory has no room for 2^32 numbers, nor do its copies count them. Tokens of drafts and
# pending ones are laid out by head for it, in whole tiles of 8, which is written and read again.
TPU_SLOTS, TPU_DRAFTS_MOST_BYTES = 513, 1.35


def _tpu_delta_rows() -> Iterator[Row]:
    """The same on a TPU, and heads whose sides are no whole tiles."""

    def row(dtype, kept, sizes, quick=False, **more):
        limits = {"tensor_cores": False, **more}
        return Row("gated_delta", "mosaic_tpu", "tpu", dtype, kept, replace(sizes, slots=TPU_SLOTS), quick, **limits)

    for dtype in FLOATS[:2]:
        for kept in FLOATS[:2]:
            yield row(dtype, kept, DeltaSizes(*QWEN3_NEXT), (dtype, kept) == ("float32", "float32"))
    for heads in (OLMO_HYBRID, KIMI_LINEAR, NARROW):
        for kept in FLOATS[:2]:
            yield row("float32", kept, DeltaSizes(*heads))
    yield row("float32", "float32", DeltaSizes(*QWEN3_NEXT, num_sequences=8))
    for heads in (QWEN3_NEXT, OLMO_HYBRID, KIMI_LINEAR):
        drafts = DeltaSizes(*heads, width=4, room=3)
        yield row("float32", "float32", drafts, most_bytes=TPU_DRAFTS_MOST_BYTES)


# Zeros behind the last token, numbers of chunks, and kernels for triangles, states and outputs; by channel one more.
CUDA_RAGGED = MappingProxyType({"min_blocks": 2, "max_kernels": 8})


def _delta_ragged_rows() -> Iterator[Row]:
    """Chunks of prompts, in every dtype at the usual heads."""
    for platform, impl, kinds, limits in (
        ("cuda", "triton", FLOATS, CUDA_RAGGED),
        ("tpu", "mosaic_tpu", FLOATS[:2], {"tensor_cores": False}),
    ):

        def row(dtype, kept, heads, quick=False, platform=platform, impl=impl, limits=limits, **more):
            slots = TPU_SLOTS if platform == "tpu" else 0
            sizes = DeltaSizes(*heads, num_sequences=4, width=2048, slots=slots, **more)
            return Row("gated_delta_ragged", impl, platform, dtype, kept, sizes, quick, **limits)

        for kept in kinds:
            yield row("float32", kept, QWEN3_NEXT, kept == "float32")
        yield row("bfloat16", "bfloat16", QWEN3_NEXT)
        for heads in (OLMO_HYBRID, KIMI_LINEAR):
            yield row("float32", "float32", heads)
        yield row("float32", "float32", KIMI_LINEAR if platform == "cuda" else NARROW, room=3 * (platform == "cuda"))


def _expert_sizes(model: str, num_rows: int, activation: Activation, bias: bool = False) -> Iterator[ExpertSizes]:
    """A model's two products: gate and up with what closes them, and down."""
    experts, _, width, depth = MODELS[model]
    yield ExpertSizes(num_rows, experts, 2 * width, depth, activation, bias)
    yield ExpertSizes(num_rows, experts, depth, width, None, bias)


# Tiles of rows are cut, and an answer of zeros is begun, by programs of XLA's. A TPU's rows are laid out by tiles of 16
# at the least, one row of which may be real, and are read again for each piece of a weight.
CUDA_EXPERTS = MappingProxyType({"min_blocks": 2, "max_kernels": 8})
TPU_EXPERTS = MappingProxyType({"most_bytes": 1.15})


def _expert_rows() -> Iterator[Row]:
    """A model of many narrow experts in every dtype, few rows and many; other models in bfloat16."""
    for platform, impl, dtypes, limits in (
        ("cuda", "triton", ("bfloat16", "float16", "float32"), CUDA_EXPERTS),
        ("tpu", "mosaic_tpu", ("bfloat16", "float32"), TPU_EXPERTS),
    ):

        def row(dtype, sizes, quick=False, platform=platform, impl=impl, limits=limits):
            return Row("grouped_matmul", impl, platform, dtype, dtype, sizes, quick, **limits)

        for num_rows in (64, 4096):
            for dtype in dtypes:
                for sizes in _expert_sizes("qwen3-30b-a3b", num_rows, SWIGLU):
                    yield row(dtype, sizes, dtype == "bfloat16" and num_rows == 64 and bool(sizes.activation))
            for sizes in _expert_sizes("mixtral-8x7b", num_rows, SWIGLU):
                yield row("bfloat16", sizes)
            if platform != "cuda":
                continue
            # 2880 inputs are no whole tiles of a TPU's; the larger model's weights are just under 4 GiB.
            for model in ("gpt-oss-20b", "gpt-oss-120b"):
                for sizes in _expert_sizes(model, num_rows, CLAMPED, True):
                    yield row("bfloat16", sizes)
            for sizes in _expert_sizes("qwen3-next-80b-a3b", num_rows, SWIGLU):
                yield row("bfloat16", sizes)
        yield row("bfloat16", ExpertSizes(64, 32, 2048, 2048, SWIGLU, bias=True))


# A TPU loads no float16, and its memory has no room for 2^32 numbers. Heads and states that are no whole tiles of it.
SSD_TPU_SLOTS, SSD_NARROW, SSD_ODD = 257, (24, 1, 64, 64), (32, 8, 192, 96)


def _tpu_ssd_rows() -> Iterator[Row]:
    """What models decode with on a TPU, every dtype that it loads, and drafts."""

    def row(dtype, kept, sizes, quick=False):
        sizes = replace(sizes, slots=SSD_TPU_SLOTS)
        return Row("ssd_rows", "mosaic_tpu", "tpu", dtype, kept, sizes, quick, tensor_cores=False)

    for dtype in FLOATS[:2]:
        for kept in FLOATS[:2]:
            yield row(dtype, kept, SsdSizes(*MAMBA2), (dtype, kept) == ("bfloat16", "float32"))
    for heads in (NEMOTRON_H, FALCON_H1, SSD_NARROW, SSD_ODD):
        for kept in FLOATS[:2]:
            yield row("bfloat16", kept, SsdSizes(*heads))
    yield row("bfloat16", "float32", SsdSizes(*MAMBA2, num_sequences=8))
    yield row("bfloat16", "float32", SsdSizes(*MAMBA2, num_sequences=8, room=3))
    for heads in (MAMBA2, FALCON_H1):
        yield row("bfloat16", "float32", SsdSizes(*heads, width=4, room=3))


# Programs beside the kernel cut chunks, once a step, and begin an answer of zeros.
SSD_RAGGED = MappingProxyType({"min_blocks": 2, "max_kernels": 9})


def _ssd_ragged_rows() -> Iterator[Row]:
    """What models prefill with: every dtype at the usual sizes, other models, pending rows to take in first."""

    def row(dtype, kept, sizes, quick=False):
        return Row("ssd_ragged", "triton", "cuda", dtype, kept, sizes, quick, **SSD_RAGGED)

    prefill = {"num_sequences": 4, "width": 2048}
    for dtype in FLOATS:
        for kept in FLOATS:
            yield row(dtype, kept, SsdRaggedSizes(*MAMBA2, **prefill), (dtype, kept) == ("bfloat16", "float32"))
    for heads in (NEMOTRON_H, FALCON_H1):
        yield row("bfloat16", "float32", SsdRaggedSizes(*heads, **prefill))
    yield row("bfloat16", "float32", SsdRaggedSizes(*MAMBA2, **prefill, room=3))


def _tpu_ssd_ragged_rows() -> Iterator[Row]:
    """The same on a TPU, and heads and states that are no whole tiles."""

    def row(dtype, kept, heads, quick=False):
        sizes = SsdRaggedSizes(*heads, num_sequences=4, width=2048, slots=SSD_TPU_SLOTS)
        return Row("ssd_ragged", "mosaic_tpu", "tpu", dtype, kept, sizes, quick)

    for dtype in FLOATS[:2]:
        for kept in FLOATS[:2]:
            yield row(dtype, kept, MAMBA2, (dtype, kept) == ("bfloat16", "float32"))
    for heads in (NEMOTRON_H, FALCON_H1, SSD_NARROW, SSD_ODD):
        yield row("bfloat16", "float32", heads)


CONV_TPU_SLOTS = 513


def _portable_conv_rows() -> Iterator[Row]:
    """Where XLA's form has no kernel in its place: it moves no more than the least, and on a TPU what lies between
    arguments and results never leaves VMEM."""

    def row(entry, platform, dtype, sizes, **more):
        return Row(entry, "xla", platform, dtype, dtype, sizes, tensor_cores=False, **more)

    for channels in (CONV_SIZES[0][0], CONV_SIZES[-1][0]):
        for dtype in FLOATS[:2]:
            ragged = ConvRaggedSizes(channels, 4, num_sequences=4, width=2048)
            yield row("conv_ragged", "cuda", dtype, ragged, max_kernels=9)
            yield row("conv_ragged", "tpu", dtype, replace(ragged, slots=CONV_TPU_SLOTS))
            yield row("conv_rows", "tpu", dtype, ConvSizes(channels, 4, slots=CONV_TPU_SLOTS))
    drafts = ConvSizes(CONV_SIZES[0][0], 4, width=4, room=3, slots=CONV_TPU_SLOTS)
    yield row("conv_rows", "tpu", "bfloat16", drafts)


def _conv_rows_of_models() -> Iterator[Row]:
    """Channels of the models' convolutions, every dtype, both sizes of batch, and drafts."""

    def row(dtype, sizes, quick=False):
        return Row("conv_rows", "triton", "cuda", dtype, dtype, sizes, quick, max_kernels=3, tensor_cores=False)

    for channels, taps, width in CONV_SIZES:
        sizes = ConvSizes(channels, taps, width=width, room=width - 1)
        for dtype in FLOATS if width == 1 else FLOATS[1:2]:
            yield row(dtype, sizes, dtype == "bfloat16" and width == 1)
    yield row("bfloat16", ConvSizes(*CONV_SIZES[0][:2], num_sequences=8))
    yield row("bfloat16", ConvSizes(*CONV_SIZES[0][:2], num_sequences=8, room=3))


ROWS: tuple[Row, ...] = (
    *_state_rows_of_models(),
    *_tpu_delta_rows(),
    *_delta_ragged_rows(),
    *_expert_rows(),
    *_tpu_ssd_rows(),
    *_ssd_ragged_rows(),
    *_tpu_ssd_ragged_rows(),
    *_conv_rows_of_models(),
    *_portable_conv_rows(),
)
