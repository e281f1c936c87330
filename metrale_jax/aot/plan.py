# SPDX-License-Identifier: Apache-2.0
"""`Plan`: whether a model fits a machine and how, and how fast it can be there at most."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from metrale_jax.aot.budget import Budget
from metrale_jax.aot.chips import Chip
from metrale_jax.aot.roofline import Work
from metrale_jax.aot.workspace import Workspace
from metrale_jax.engine.settings import MOST
from pallas_kernels.shapes import ceil_div

MIB = 1 << 20


@dataclass(frozen=True)
class Ask:
    """What is planned for: so many sequences at once, each of at most `context` tokens, the model's limit on that, and
    the tokens of a prefill chunk."""

    num_sequences: int
    context: int
    max_context: int
    chunk_tokens: int


@dataclass(frozen=True)
class Plan:
    """One model on one machine. Bytes and work are those of one of `num_devices` devices, which share the model."""

    model: str
    dtype: str
    kv_format: str
    attention: str
    chip: Chip
    num_devices: int
    idle_devices: int
    ask: Ask
    budget: Budget
    workspace: Workspace
    decode: Work
    prefill: Work

    @property
    def fits(self) -> bool:
        """Whether what was asked for fits."""
        return self.workspace.refusal == "" and self.budget.fits(self.ask.num_sequences, self.ask.context)

    @property
    def largest_batch(self) -> int:
        """The most sequences of the context asked for that fit, and that one engine runs."""
        return min(self.budget.max_sequences(self.ask.context), MOST["max_sequences"])

    @property
    def kv_cache_mib(self) -> int:
        """The pool that `LLM` is to be given, over all devices."""
        ask = self.ask
        return max(1, ceil_div(self.budget.num_blocks(ask.num_sequences, ask.context) * self.pool_block, MIB))

    @property
    def snapshot_mib(self) -> int:
        """What `LLM` is to be given for states that are kept; every device has all of each."""
        return ceil_div(self.budget.kept, MIB)

    @property
    def pool_block(self) -> int:
        """Bytes of a block over all devices."""
        return self.budget.block * self.num_devices

    def options(self) -> dict[str, Any]:
        """What to tell `LLM`."""
        ask = self.ask
        options = {
            "max_sequences": ask.num_sequences,
            "max_context_tokens": ask.context,
            "kv_cache_mib": self.kv_cache_mib,
            "prefill_tokens": ask.chunk_tokens,
            "block_size": self.budget.block_size,
            "dtype": self.dtype,
            "kv_dtype": self.kv_format,
        }
        if self.budget.slot:
            options["snapshot_mib"] = self.snapshot_mib
        if self.attention != "auto":
            options["attention"] = self.attention
        return options if self.num_devices == 1 else {**options, "tensor_parallel": self.num_devices}

    def data(self) -> dict[str, Any]:
        """The plan as plain values, for `--json`."""
        ask, budget, chip = self.ask, self.budget, self.chip
        return {
            "model": self.model,
            "dtype": self.dtype,
            "kv_format": self.kv_format,
            "chip": chip.kind,
            "mesh": {"data": 1, "expert": 1, "tensor": self.num_devices},
            "idle_devices": self.idle_devices,
            "max_seqs": ask.num_sequences,
            "context": ask.context,
            "fits": self.fits,
            "refusal": self.workspace.refusal,
            "bytes_per_device": {
                "capacity": budget.capacity,
                "weights": budget.weights,
                "kv_blocks": budget.pool(ask.num_sequences, ask.context) - (ask.num_sequences + 1) * budget.slot,
                "recurrent_slots": (ask.num_sequences + 1) * budget.slot,
                "snapshots": budget.kept,
                "workspace": budget.workspace,
            },
            "kv_block_bytes_per_device": budget.block,
            "kv_block_data_bytes_per_device": budget.block_data,
            "largest_batch": self.largest_batch,
            "largest_context": budget.max_context(ask.num_sequences, ask.max_context),
            "workspace_by_program": dict(self.workspace.by_program),
            "decode": _step_data(self.decode, chip),
            "prefill": _step_data(self.prefill, chip),
            "options": self.options(),
        }

    def lines(self) -> Iterator[tuple[str, str]]:
        """(name, value) rows for people."""
        ask, budget, chip = self.ask, self.budget, self.chip
        each = "" if self.num_devices == 1 else f" on each of {self.num_devices} devices"
        pool, blocks = budget.pool(ask.num_sequences, ask.context), budget.num_blocks(ask.num_sequences, ask.context)
        yield "model", f"{self.model}, {self.dtype}, keys and values {self.kv_format}"
        yield "device", f"{chip.kind}: {size(budget.capacity)} of {size(chip.memory)} for programs"
        idle = f"; {self.idle_devices} of the devices stay idle" if self.idle_devices else ""
        yield "mesh", f"data 1, expert 1, tensor {self.num_devices}{idle}"
        yield "weights", f"{size(budget.weights)}{each}"
        needed, kv = budget.needed_blocks(ask.num_sequences, ask.context), size(blocks * budget.block)
        yield (
            "KV blocks",
            (
                f"{kv}{each}: {blocks:,} blocks of {budget.block_size} tokens, {size(budget.block)} each, for "
                f"{ask.num_sequences} sequences of {ask.context:,} tokens"
            ),
        )
        if budget.block > budget.block_data:
            times = budget.block / budget.block_data
            yield "", f"memory pads a block of {size(budget.block_data)} to tiles, {times:.3g} times as much"
        if blocks > needed:
            yield "", f"{needed:,} blocks are needed, of which kernels cannot address the arrays; more they can"
        slots = f"{size((ask.num_sequences + 1) * budget.slot)}{each}: "
        if not budget.slot:
            yield "recurrent slots", f"{slots}no layer of this model keeps one"
        else:
            yield (
                "recurrent slots",
                f"{slots}{ask.num_sequences} sequences' and one of padding, {size(budget.slot)} each",
            )
            yield "snapshots", f"{size(budget.kept)}{each}: {budget.num_snapshots} states kept for later prompts"
        yield from self._fit(pool)
        if chip.flops:
            yield from _step_lines("decode step", self.decode, chip)
            yield from _step_lines("prefill chunk", self.prefill, chip)
        else:
            yield "roofline", "none: there is no data sheet for this machine"
        given = ", ".join(f"{name}={value!r}" for name, value in self.options().items())
        yield "options", f"LLM(..., {given})"

    def _fit(self, pool: int) -> Iterator[tuple[str, str]]:
        ask, budget = self.ask, self.budget
        if self.workspace.refusal:
            yield "workspace", f"unknown: {self.workspace.refusal}"
            yield "fits", "no"
            return
        yield "workspace", f"{size(budget.workspace)}, asked for by {self.workspace.largest} as compiled at full depth"
        total = budget.weights + pool + budget.kept + budget.workspace
        yield "fits", f"{self._verdict()}: {size(total)} of {size(budget.capacity)}"
        yield "largest batch", f"{self.largest_batch} sequences of {ask.context:,} tokens, with this workspace"
        longest = budget.max_context(ask.num_sequences, ask.max_context)
        why = ", the model's limit" if longest == ask.max_context else ""
        yield "largest context", f"{longest:,} tokens{why}, for {ask.num_sequences} sequences"

    def _verdict(self) -> str:
        ask, budget = self.ask, self.budget
        if self.fits:
            return "yes"
        if budget.served(ask.num_sequences, ask.context):
            return "no, memory capacity binds"
        return "no, kernels cannot address arrays of this size; ask for fewer sequences, or keys and values in 16 bits"


def _step_data(work: Work, chip: Chip) -> Mapping[str, Any]:
    if not chip.flops:
        return {"tokens": work.num_tokens}
    seconds = work.seconds(chip)
    return {
        "tokens": work.num_tokens,
        "flops": work.flops,
        "weight_bytes": work.weight_bytes,
        "kv_bytes": work.kv_bytes,
        "link_bytes": work.link_bytes,
        "seconds": seconds,
        "seconds_by_limit": dict(work.seconds_by(chip)),
        "tokens_per_s": work.num_tokens / seconds,
        "limit": work.limit(chip),
    }


def _step_lines(name: str, work: Work, chip: Chip) -> Iterator[tuple[str, str]]:
    seconds, by = work.seconds(chip), work.seconds_by(chip)
    speed = f"{work.num_tokens / seconds:,.0f} tokens/s at most; {work.limit(chip)} binds"
    yield name, f"{seconds * 1e3:.3g} ms at least for {work.num_tokens} tokens: {speed}"
    yield (
        "",
        (
            f"{work.flops / 1e12:.3g} TFLOP {by['compute'] * 1e3:.3g} ms, weights {size(work.weight_bytes)} "
            f"{by['weights bandwidth'] * 1e3:.3g} ms, KV {size(work.kv_bytes)} {by['KV bandwidth'] * 1e3:.3g} ms, "
            f"links {size(work.link_bytes)} {by['interconnect'] * 1e3:.3g} ms"
        ),
    )


def size(num_bytes: float) -> str:
    """Bytes for people, in powers of a thousand as data sheets have them."""
    for unit in ("B", "kB", "MB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} GB"
