# SPDX-License-Identifier: Apache-2.0
"""Figures of a call compiled for a TPU that is not here: what its compiler says of memory, and what its copies move.

A kernel's own copies are in no analysis of the compiler; they are counted as it starts them, whole blocks as they lie
in tiles, padding included. `bytes_ratio` compares them with the tokens that have to be read, as they lie in the pool:
it is the kernel's to keep low. `layout_ratio` compares the pool's layout with the numbers in it, which no kernel can
help: a TPU pads the width of a head to 128 numbers, and the heads of a token to whole words of 32 bits and a power of
two.
"""

import re

import jax
from jax.experimental.layout import Format
from jax.sharding import SingleDeviceSharding

from benchmarks.static.layer_rows import WRITING
from benchmarks.static.layer_traffic import TRAFFIC, expert_tile, expert_traffic
from benchmarks.static.rows import Row, abstract_storage, arguments, donated
from metrale_jax.aot.targets import Target
from metrale_jax.steps.home import lying_row_major
from pallas_kernels.kv_formats.pages import KvPages
from pallas_kernels.paged_attention.mosaic_tpu_sizes import Tiling, held, tile_shape, tiling_for, vmem_bytes
from pallas_kernels.shapes import ceil_div
from pallas_kernels.storage import padded_bytes


def figures(row: Row, target: Target) -> dict:
    """The figures of one row, as they are recorded."""
    if row.entry == "grouped_matmul":
        return expert_figures(row, target)
    if row.entry in WRITING:
        return state_figures(row, target)
    sharding = SingleDeviceSharding(target.devices()[0])

    def row_major(x: jax.ShapeDtypeStruct) -> Format:
        return lying_row_major(x, sharding)

    call, shapes = arguments(row, sharding)
    # The pool lies as steps keep it; a TPU's default order pads less, and each call would copy all of it.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=row_major(x)), shapes)
    results = jax.tree.map(row_major, jax.eval_shape(call, *shapes))
    compiled = jax.jit(call, donate_argnums=donated(row), out_shardings=results).lower(*shapes).compile()
    memory = compiled.memory_analysis()
    smallest = min(x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract_storage(row)) if x.ndim > 2)
    found = {
        "temp_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "pool_share": round(memory.temp_size_in_bytes / smallest, 4),
    }
    return {**found, **attention_figures(row)}


# A kernel's share of VMEM, as its call says in a compiled program.
_VMEM = re.compile(
    r'tpu_custom_call.*"used_scoped_memory_configs":\[{"memory_space":"1","offset":"\d+","size":"(\d+)"}'
)
# And the most that it may have.
_VMEM_ASKED = re.compile(
    r'tpu_custom_call.*?"scoped_memory_configs":\[{"memory_space":"1","offset":"\d+","size":"(\d+)"}'
)


def expert_figures(row: Row, target: Target) -> dict:
    """The figures of a grouped matmul, as they are recorded. VMEM is what the compiler gave the kernel."""
    call, shapes = arguments(row, SingleDeviceSharding(target.devices()[0]))
    compiled = jax.jit(call).lower(*shapes).compile()
    memory, (vmem,) = compiled.memory_analysis(), map(int, _VMEM.findall(compiled.as_text()))
    found = {"temp_bytes": memory.temp_size_in_bytes, "code_bytes": memory.generated_code_size_in_bytes}
    return {**found, "tile_rows": expert_tile(row.sizes), "vmem_bytes": vmem, **expert_traffic(row)}


def state_figures(row: Row, target: Target) -> dict:
    """The figures of a call that writes states in place, which lie as steps keep them."""
    sharding = SingleDeviceSharding(target.devices()[0])
    call, (storage, *others) = arguments(row, sharding)

    def placed(tree):
        return jax.tree.map(lambda x: lying_row_major(x, sharding), tree)

    lying = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), storage, placed(storage)
    )
    out, *kept = jax.eval_shape(call, storage, *others)
    results = (jax.tree.map(lambda _: sharding, out), *placed(kept))
    compiled = jax.jit(call, donate_argnums=donated(row), out_shardings=results).lower(lying, *others).compile()
    memory = compiled.memory_analysis()
    states, *pending = (x.size * x.dtype.itemsize for x in jax.tree.leaves(storage))
    smallest = min(states, max(pending, default=states))
    found = {
        "temp_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "pool_share": round(memory.temp_size_in_bytes / smallest, 4),
    }
    # XLA may keep what it hands to a kernel in VMEM, and counts it with what the kernel has of it.
    vmem = min(max(map(int, pattern.findall(compiled.as_text())), default=0) for pattern in (_VMEM, _VMEM_ASKED))
    return {**found, **({"vmem_bytes": vmem} if vmem else {}), **TRAFFIC[row.entry](row)}


def attention_figures(row: Row) -> dict:
    """VMEM of an attention call, and of decode the bytes that it moves for sequences as long as their tables."""
    if row.entry == "append":
        return {}
    _, (q, pages, rows, _) = arguments(row, None)
    if row.entry == "prefill":
        q = jax.ShapeDtypeStruct((rows.pieces.kv_lens.shape[0], rows.pieces.max_query_len, *q.shape[1:]), q.dtype)
    tiling = tiling_for(q, pages, row.sizes.v_head_dim if row.sizes.latent else 0)
    found = {"tile_tokens": tiling.tile_tokens, "vmem_bytes": vmem_bytes(tiling, q.dtype, pages)}
    return {**found, **_traffic(row, q, pages, tiling)} if row.entry == "decode" else found


def _traffic(row: Row, q: jax.ShapeDtypeStruct, pages: KvPages, tiling: Tiling) -> dict:
    sizes = row.sizes
    length = sizes.table_width * sizes.block_size
    oldest = max(0, length - sizes.query_len - sizes.window + 1) if sizes.window else 0
    blocks = ceil_div(length, sizes.block_size) - oldest // sizes.block_size
    codes = held(pages)
    block = sum(padded_bytes(tile_shape(*x.shape[2:]), x.dtype) for x in codes)
    numbers = sum(x.dtype.itemsize * x.shape[2] * x.shape[3] * x.shape[4] for x in codes)
    token = block / sizes.block_size
    if pages.scale_per_row:
        scales = len(codes) * padded_bytes(pages.k_scale.shape[2:], pages.k_scale.dtype)
        block += scales
        numbers += len(codes) * 4 * sizes.num_kv_heads * sizes.block_size
        token += scales / sizes.block_size
    widths = sizes.head_dim, sizes.v_head_dim
    ends = sum(padded_bytes((tiling.num_groups, tiling.rows, width), q.dtype) for width in widths)
    least_ends = sizes.query_len * sizes.num_heads * sum(widths) * q.dtype.itemsize
    # A row's table is read beside that of the row before it, too.
    moved = blocks * block + ends + 2 * padded_bytes((1, sizes.table_width), "int32")
    least = (length - oldest) * token + least_ends + 4 * blocks
    return {"bytes_ratio": round(moved / least, 4), "layout_ratio": round(block / numbers, 4)}
