# SPDX-License-Identifier: Apache-2.0
"""What a user would run instead on a GPU.

Each peer takes a call of `device_kernels` and answers with seconds a call, or with the reason why it has none. Each
gets sequences of the same lengths, in bfloat16, in the layout of its own.
"""

import importlib.util
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.timing import seconds_a_call

PLAIN = "keys and values in bfloat16 only"


def _tensors(call: Any) -> tuple[jax.Array, jax.Array]:
    """Queries `[S, Q, N, H]` and, for keys and values alike, `[S, T, K, H]`."""
    q = (call.num_sequences, call.new, call.num_heads, call.head_dim)
    kv = (call.num_sequences, call.context, call.num_kv_heads, call.head_dim)
    return tuple(jax.random.normal(jax.random.key(0), shape, call.dtype) for shape in (q, kv))


def _declined(call: Any) -> str:
    if call.entry == "append":
        return "has no append"
    return "" if call.kv_format == call.dtype == "bfloat16" else PLAIN


def cudnn(call: Any, times: int) -> float | str:
    """`jax.nn.dot_product_attention` by cuDNN over keys and values that lie in one piece."""
    if reason := _declined(call):
        return reason
    if call.new > 1 and call.new != call.context:
        return "its causal mask begins at the first key"
    q, kv = _tensors(call)
    attend = partial(jax.nn.dot_product_attention, is_causal=call.new > 1, implementation="cudnn")
    return _or_reason(lambda: seconds_a_call(lambda q, k, v: attend(q, k, v), q, times, kv, kv + 1))


def pallas_paged(call: Any, times: int) -> float | str:
    """JAX's own paged attention in Pallas over pages `[K, P, B, H]`."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    if reason := _declined(call):
        return reason
    if call.new > 1:
        return "one query a sequence only"
    width = -(-call.context // call.block_size)
    shape = (call.num_kv_heads, call.num_sequences * width, call.block_size, call.head_dim)
    pages = jax.random.normal(jax.random.key(0), shape, call.dtype)
    table = jax.random.permutation(jax.random.key(1), shape[1]).reshape(call.num_sequences, width).astype(jnp.int32)
    lens = jnp.full(call.num_sequences, call.context, jnp.int32)
    q = _tensors(call)[0][:, 0]
    return _or_reason(lambda: seconds_a_call(paged_attention, q, times, pages, pages + 1, table, lens))


def torch_sdpa(call: Any, times: int) -> float | str:
    """PyTorch's `scaled_dot_product_attention` over keys and values in one piece, its kernel its choice."""
    if reason := _declined(call) or _no_torch():
        return reason
    import torch

    if call.new > 1 and call.new != call.context:
        return "its causal mask begins at the first key"

    def of(length, heads):
        shape = (call.num_sequences, heads, length, call.head_dim)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    q, k, v = of(call.new, call.num_heads), of(call.context, call.num_kv_heads), of(call.context, call.num_kv_heads)
    attend = torch.nn.functional.scaled_dot_product_attention
    return _or_reason(lambda: _torch_seconds(lambda: attend(q, k, v, is_causal=call.new > 1, enable_gqa=True), times))


def flash_attn(call: Any, times: int) -> float | str:
    """Dao's flash-attn over pages, which there have to be multiples of 256 tokens."""
    if reason := _declined(call) or _no_torch():
        return reason
    if importlib.util.find_spec("flash_attn") is None:
        return "not installed"
    import torch
    from flash_attn import flash_attn_with_kvcache

    block_size = max(256, call.block_size)
    width = -(-call.context // block_size)
    shape = (call.num_sequences * width, block_size, call.num_kv_heads, call.head_dim)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    table = torch.randperm(shape[0], device="cuda", dtype=torch.int32).reshape(call.num_sequences, width)
    lens = torch.full((call.num_sequences,), call.context, device="cuda", dtype=torch.int32)
    q_shape = (call.num_sequences, call.new, call.num_heads, call.head_dim)
    q = torch.randn(q_shape, device="cuda", dtype=torch.bfloat16)
    attend = partial(flash_attn_with_kvcache, q, k, v, cache_seqlens=lens, block_table=table, causal=True)
    return _or_reason(lambda: _torch_seconds(attend, times))


def _no_torch() -> str:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return "" if torch.cuda.is_available() else "torch sees no GPU"


def _torch_seconds(call: Callable, times: int) -> float:
    """The time of one call among many that are launched in a CUDA graph, as a loop inside `jit` is."""
    import torch

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()

    def run():
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    run()
    return min(run() for _ in range(5)) / times


def _or_reason(measure: Callable[[], float]) -> float | str:
    """What a peer that does not run says of it: others are to be timed all the same."""
    try:
        return measure()
    except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
        return f"does not run: {(str(error).strip() or type(error).__name__).splitlines()[0][:120]}"


PEERS: Mapping[str, Callable[[Any, int], float | str]] = MappingProxyType(
    {
        "jax.nn cudnn": cudnn,
        "jax pallas paged": pallas_paged,
        "torch sdpa": torch_sdpa,
        "flash-attn": flash_attn,
    }
)
