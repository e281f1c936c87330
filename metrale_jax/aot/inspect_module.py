# SPDX-License-Identifier: Apache-2.0
"""Whether a compiled step updates its pool in place, read from the text of the compiled module.

A scheduled module is explicit: where XLA cannot update a buffer in place it has inserted a `copy`. So a step is in
place if the module aliases every pool output to its pool parameter, and if no instruction that gets a buffer of its
own has a result as large as a pool array that counts. Instructions inside a fusion have no buffers; a fusion's results
do, unless their roots update one of its parameters.
"""

from dataclasses import dataclass

from metrale_jax.aot.module_text import Instruction, Module, array_bytes, parse_module

# Results that are views of buffers of others, or are judged where their computation or their start is.
VIEWS = frozenset(
    "parameter get-tuple-element tuple bitcast while conditional call optimization-barrier add-dependency domain "
    "after-all".split()
)
UPDATES = frozenset({"dynamic-update-slice", "scatter"})
PURE_COPIES = frozenset({"copy", "copy-start", "transpose", "reshape"})
NUM_COPIES_KEPT = 5
# One part in so many of the pool: what is smaller, such as its slots' positions, may be copied.
NEGLIGIBLE = 1000


@dataclass(frozen=True)
class PoolArrays:
    """Where a step's pool is: its leaves are parameters `first_parameter` and on, outputs 0 and on.

    `sizes` holds the bytes of each leaf on one device.
    """

    first_parameter: int
    sizes: tuple[int, ...]

    def smallest(self, parts: int) -> int:
        """Bytes of the smallest leaf that is at least one part in so many of the pool."""
        return min(size for size in self.sizes if size * parts >= sum(self.sizes))


@dataclass(frozen=True)
class Copy:
    """An instruction that writes `num_bytes` into a buffer of its own."""

    instruction: str
    opcode: str
    num_bytes: int
    origin: str

    def __str__(self):
        return f"{self.opcode} {self.instruction} of {self.num_bytes / 1e6:.1f} MB from {self.origin or 'the compiler'}"


@dataclass(frozen=True)
class Inspection:
    """What the text says. `problems` is empty if the pool is updated in place.

    `largest_copies` are the largest of the instructions that only move data.
    """

    problems: tuple[str, ...]
    largest_copies: tuple[Copy, ...]

    @property
    def in_place(self) -> bool:
        """Whether every pool array is updated in place."""
        return not self.problems


def inspect_module(text: str, pool: PoolArrays) -> Inspection:
    """The verdict on a module's text (`compiled.as_text()`)."""
    module = parse_module(text)
    written = [
        Copy(instruction.name, _kind(module, instruction), size, instruction.origin)
        for instruction in module.scheduled()
        for size in own_buffers(module, instruction)
    ]
    copies = [f"{copy}, as large as a pool array" for copy in written if copy.num_bytes >= pool.smallest(NEGLIGIBLE)]
    pure = sorted((copy for copy in written if copy.opcode in PURE_COPIES), key=lambda copy: -copy.num_bytes)
    return Inspection((*_alias_problems(module, pool), *copies), tuple(pure[:NUM_COPIES_KEPT]))


def _alias_problems(module: Module, pool: PoolArrays) -> list[str]:
    problems = []
    for leaf in range(len(pool.sizes)):
        wanted, found = pool.first_parameter + leaf, module.aliases.get(leaf)
        if found is None:
            problems.append(f"pool array {leaf}: output {leaf} aliases no parameter, parameter {wanted} was donated")
        elif found != wanted:
            problems.append(f"pool array {leaf}: output {leaf} aliases parameter {found}, not its own {wanted}")
    return problems


def own_buffers(module: Module, instruction: Instruction) -> list[int]:
    """Bytes of each result of an instruction that is written to a buffer of its own."""
    opcode = instruction.opcode
    if opcode in VIEWS or opcode in UPDATES or opcode.endswith(("-done", "-update")):
        return []
    shapes = list(instruction.shapes)
    if opcode.endswith("-start"):
        # The tuple of an asynchronous start names its operands beside its result.
        for operand in module.operand_shapes(instruction):
            if operand in shapes:
                shapes.remove(operand)
        return [array_bytes(shape) for shape in shapes]
    in_place = set(instruction.aliased_outputs)
    if opcode == "fusion":
        in_place |= _updated_outputs(module, instruction)
    return [array_bytes(shape) for index, shape in enumerate(shapes) if index not in in_place]


def _updated_outputs(module: Module, fusion: Instruction) -> set[int]:
    """The outputs of a fusion whose roots are updates of one of its parameters."""
    body = module.computations[fusion.calls]
    root = next(instruction for instruction in body.values() if instruction.is_root)
    roots = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return {index for index, result in enumerate(roots) if _updates_a_parameter(module, body, result)}


def _updates_a_parameter(module: Module, body: dict[str, Instruction], result: Instruction) -> bool:
    result = _behind_bitcasts(body, result)
    if result.opcode == "fusion":
        nested = _updated_outputs(module, result) == {0}
        return nested and any(_behind_bitcasts(body, body[name]).opcode == "parameter" for name in result.operands)
    if result.opcode not in UPDATES:
        return False
    target = _behind_bitcasts(body, body[result.operands[0]])
    return target.opcode == "parameter" or _updates_a_parameter(module, body, target)


def _behind_bitcasts(body: dict[str, Instruction], instruction: Instruction) -> Instruction:
    while instruction.opcode == "bitcast":
        instruction = body[instruction.operands[0]]
    return instruction


def _kind(module: Module, instruction: Instruction) -> str:
    """The opcode; for a fusion that does no more than move data, that of its root."""
    if instruction.opcode != "fusion":
        return instruction.opcode
    body = module.computations[instruction.calls]
    root = _behind_bitcasts(body, next(inner for inner in body.values() if inner.is_root))
    return root.opcode if root.opcode in PURE_COPIES else instruction.opcode
