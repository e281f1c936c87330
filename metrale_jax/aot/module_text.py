# SPDX-License-Identifier: Apache-2.0
"""The text of a compiled XLA module as data: instructions, their shapes and calls, and the module's aliases."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from metrale_jax.core.errors import Unsupported

_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<=]*)\]")
_ALIAS = re.compile(r"\{(\d*)[\d, ]*\}: \((\d+), ")
_OUTPUT_ALIAS = re.compile(r"\{(\d*)[\d, ]*\}: \(\d+, ")
_CALLS = re.compile(r"\bcalls=%?([\w.\-]+)")
_ORIGIN = re.compile(r'op_name="([^"]*)"')
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_NAME = re.compile(r"%?([\w.\-]+)$")


@dataclass(frozen=True)
class Instruction:
    """One line: `shapes` are the arrays of its result, a tuple laid flat, as `dtype[dims]` without layouts.

    `calls` names a fusion's computation; `aliased_outputs` are results that a custom call shares with operands;
    `origin` is the name that JAX gave the operation.
    """

    name: str
    opcode: str
    shapes: tuple[str, ...]
    operands: tuple[str, ...]
    is_root: bool
    calls: str
    aliased_outputs: tuple[int, ...]
    origin: str


@dataclass(frozen=True)
class Module:
    """Computations by name; `aliases` maps an output to the parameter whose buffer it takes."""

    computations: dict[str, dict[str, Instruction]]
    aliases: dict[int, int]

    def scheduled(self) -> Iterator[Instruction]:
        """Every instruction outside fusions: those whose results may have buffers."""
        lines = [line for body in self.computations.values() for line in body.values()]
        fused = {line.calls for line in lines if line.opcode == "fusion"}
        for name, body in self.computations.items():
            if name not in fused:
                yield from body.values()

    def operand_shapes(self, instruction: Instruction) -> list[str]:
        """The arrays of an instruction's operands, laid flat."""
        body = next(body for body in self.computations.values() if body.get(instruction.name) is instruction)
        return [shape for name in instruction.operands for shape in body[name].shapes]


def array_dims(shape: str) -> tuple[int, ...]:
    """The dimensions of `dtype[dims]`, a dynamic one at its bound."""
    return tuple(int(size.removeprefix("<=")) for size in _ARRAY.match(shape).group(2).split(",") if size)


def array_bytes(shape: str) -> int:
    """Bytes of `dtype[dims]`, without a layout's padding; a dynamic dimension counts at its bound."""
    dtype = _ARRAY.match(shape).group(1)
    width = re.search(r"\d+", dtype)
    bits = 8 if dtype == "pred" else int(width.group()) if width else 0
    return math.prod(array_dims(shape)) * bits // 8


def parse_module(text: str) -> Module:
    """The module that `text` prints. Raises `Unsupported` if it is not the text of a scheduled HLO module."""
    lines = text.splitlines()
    if not lines or not lines[0].startswith("HloModule") or "is_scheduled=true" not in lines[0]:
        raise Unsupported(
            f"module text begins with {text[:40]!r} and is not a scheduled HLO module; pass compiled.as_text()."
        )
    computations: dict[str, dict[str, Instruction]] = {}
    body: dict[str, Instruction] = {}
    for line in lines[1:]:
        head = _COMPUTATION.match(line)
        if head:
            body = computations[head.group(2)] = {}
            continue
        match = _INSTRUCTION.match(line)
        if match:
            instruction = _instruction(match, line[match.end() :])
            body[instruction.name] = instruction
    return Module(computations, _aliases(lines[0]))


def _aliases(header: str) -> dict[int, int]:
    start = header.find("input_output_alias=")
    if start < 0:
        return {}
    table = _balanced(header[start + len("input_output_alias=") :])
    return {int(output or 0): int(parameter) for output, parameter in _ALIAS.findall(table)}


def _instruction(match: re.Match, rest: str) -> Instruction:
    result = _balanced(rest) if rest.startswith("(") else rest[: rest.index(" ")]
    rest = rest[len(result) :].lstrip()
    opcode = rest[: rest.index("(")]
    arguments = _balanced(rest[len(opcode) :])
    attributes = rest[len(opcode) + len(arguments) :]
    calls, origin = _CALLS.search(attributes), _ORIGIN.search(attributes)
    return Instruction(
        name=match.group(2),
        opcode=opcode,
        shapes=tuple(found.group() for found in _ARRAY.finditer(result)),
        operands=() if opcode in ("parameter", "constant") else _operands(arguments[1:-1]),
        is_root=match.group(1) is not None,
        calls=calls.group(1) if calls else "",
        aliased_outputs=_aliased_outputs(attributes),
        origin=origin.group(1) if origin else "",
    )


def _aliased_outputs(attributes: str) -> tuple[int, ...]:
    start = attributes.find("output_to_operand_aliasing=")
    if start < 0:
        return ()
    table = _balanced(attributes[start + len("output_to_operand_aliasing=") :])
    return tuple(int(output or 0) for output in _OUTPUT_ALIAS.findall(table))


def _operands(text: str) -> tuple[str, ...]:
    """Names in an operand list, which may or may not print each operand's shape before its name."""
    text = re.sub(r"/\*.*?\*/", "", text)
    names, depth, start = [], 0, 0
    for position, character in enumerate([*text, ","]):
        depth += (character in "({[") - (character in ")}]")
        if character == "," and depth == 0:
            found = _NAME.search(text[start:position].strip())
            start = position + 1
            if found:
                names.append(found.group(1))
    return tuple(names)


def _balanced(text: str) -> str:
    """The prefix of `text` up to the bracket that closes its first character."""
    depth = 0
    for match in re.finditer(r"[(){}]", text):
        depth += 1 if match.group() in "({" else -1
        if depth == 0:
            return text[: match.end()]
    raise Unsupported(f"module text has no closing bracket for {text[:40]!r}; pass the whole of compiled.as_text().")
