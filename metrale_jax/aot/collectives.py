# SPDX-License-Identifier: Apache-2.0
"""What the devices of a compiled step tell each other, and whether that is what sharing a model out intends.

Each layer sums partial products twice, after attention's output projection and after the feed-forward layer's, and the
embedding is summed once. Logits are gathered; weights and pool stay where they are.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from metrale_jax.aot.module_text import Module, array_bytes, array_dims

OPCODES = frozenset(
    "all-reduce all-gather reduce-scatter all-to-all ragged-all-to-all collective-permute collective-broadcast".split()
)
# Bytes of what drawing may tell beside logits.
SMALL = 1 << 20


@dataclass(frozen=True)
class Collective:
    """One instruction: its opcode without `-start`, and the arrays that it leaves on a device."""

    opcode: str
    shapes: tuple[str, ...]
    origin: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(map(array_bytes, self.shapes))

    def __str__(self):
        return f"{self.opcode} to {', '.join(self.shapes)} from {self.origin or 'the compiler'}"


def collectives(module: Module) -> Iterator[Collective]:
    """Every collective of a module, each of a loop's once."""
    for body in module.computations.values():
        for instruction in body.values():
            opcode = instruction.opcode.removesuffix("-start")
            if opcode in OPCODES:
                operands = module.operand_shapes(instruction) if opcode != instruction.opcode else []
                yield Collective(opcode, results(instruction.shapes, operands), instruction.origin)


def results(shapes: tuple[str, ...], operands: Iterable[str]) -> tuple[str, ...]:
    """The arrays of a result but for those of its operands, which an asynchronous start names beside it."""
    left = list(shapes)
    for operand in operands:
        if operand in left and len(left) > 1:
            left.remove(operand)
    return tuple(shape for shape in left if array_dims(shape)) or shapes


@dataclass(frozen=True)
class Intended:
    """What a step of `num_tokens` tokens and `num_layers` layers of width `width` may tell.

    `whole` are the sorted shapes of its weights and pool arrays on all devices together, which no device may get.
    `embedding` says whether the devices share it; then rows of `vocab` logits are gathered. All else is small.
    """

    num_tokens: int
    num_layers: int
    width: int
    whole: frozenset[tuple[int, ...]]
    embedding: bool
    vocab: int

    def problems(self, found: Iterable[Collective]) -> tuple[str, ...]:
        """How the collectives that were found differ."""
        found = list(found)
        wanted, size = 2 * self.num_layers + self.embedding, self.num_tokens * self.width
        sums = sum(1 for one in found if one.opcode == "all-reduce" for s in one.shapes if prod(array_dims(s)) == size)
        rows = f"{self.num_tokens} hidden rows of {self.width}"
        problems = [] if sums == wanted else [f"{sums} sums of {rows}, intended are {wanted}"]
        for one in found:
            sums = one.opcode == "all-reduce" and all(prod(array_dims(shape)) == size for shape in one.shapes)
            logits = one.opcode == "all-gather" and all(
                prod(array_dims(shape)) % self.vocab == 0 for shape in one.shapes
            )
            if one.num_bytes > SMALL and not sums and not logits:
                problems.append(f"{one}, neither a sum of hidden rows nor logits")
            if any(tuple(sorted(array_dims(shape))) in self.whole for shape in one.shapes):
                problems.append(f"{one}, the whole of a weight or of the pool")
        return tuple(problems)
