"""The text of a compiled program, read into computations and their instructions.

Optimised HLO flows in as XLA prints it; records flow out. Only what moving bytes are counted
from is kept.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16,
    "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64,
    "f8e4m3fn": 8, "f8e5m2": 8, "token": 0,
}  # fmt: skip
# Kernels and tables of the source would be most of the text.
NOISE = re.compile(r'"body":"[^"]*"')
SHAPE = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
SPACE = re.compile(r"S\((\d+)\)")
HEAD = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\{$")
NAME = re.compile(r"%([\w.\-]+)")


class Buffer(NamedTuple):
    """An array of the program."""

    size: int  # bytes
    hbm: bool  # False where it lives in a memory of the core


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    buffers: tuple[Buffer, ...]  # of its result; several for a tuple
    operands: tuple[str, ...]
    attributes: str  # the rest of the line; of a parameter or constant from its value on
    root: bool


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Instructions by name, in order."""

    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        """Whose result the computation's is."""
        return next(x for x in reversed(self.instructions.values()) if x.root)

    def given(self, operands: Sequence[str]) -> Iterator[tuple[str, Instruction]]:
        """What each parameter stands for; one that nothing reads may have no line at all."""
        for x in self.instructions.values():
            if x.opcode == "parameter":
                yield operands[int(x.attributes.partition(")")[0])], x

    def users(self, name: str) -> Iterator[Instruction]:
        """Instructions that read `name`."""
        return (x for x in self.instructions.values() if name in x.operands)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled module."""

    computations: dict[str, Computation]
    entry: str


def parse(text: str) -> Program:
    """Reads what ``compiled.as_text()`` says."""
    computations: dict[str, Computation] = {}
    lines: dict[str, Instruction] = {}
    entry = inside = ""
    for line in NOISE.sub("", text).splitlines():
        head = HEAD.match(line)
        if head:
            inside, lines = head[2], {}
            entry = inside if head[1] else entry
        elif line.startswith("}") and inside:
            computations[inside] = Computation(instructions=lines)
            inside = ""
        elif inside and " = " in line:
            read = _instruction(line)
            lines[read.name] = read
    return Program(computations=computations, entry=entry)


def called(instruction: Instruction, key: str) -> list[str]:
    """Computations that an attribute such as `calls` or `body` names."""
    found = re.search(rf"\b{key}=(\{{[^}}]*\}}|%[\w.\-]+)", instruction.attributes)
    return NAME.findall(found[1]) if found else []


def _instruction(line: str) -> Instruction:
    left, right = line.strip().split(" = ", 1)
    end = _closing(right, 0) if right.startswith("(") else right.index(" ")
    kind, rest = right[:end], right[end:].strip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    literal = rest.startswith(("parameter(", "constant("))
    return Instruction(
        name=NAME.search(left)[1],  # type: ignore[index]
        opcode=rest[:opening],
        buffers=tuple(_buffers(kind)),
        operands=() if literal else tuple(NAME.findall(rest[opening:closing])),
        attributes=rest[opening + 1 if literal else closing :],
        root=left.startswith("ROOT"),
    )


def _closing(text: str, at: int) -> int:
    """The place after the parenthesis that closes the one at `at`."""
    depth = 0
    for place in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1
    raise ValueError(f"unbalanced: {text[at : at + 80]}")


def _buffers(kind: str) -> Iterator[Buffer]:
    for dtype, sides, layout in SHAPE.findall(kind):
        size = BITS[dtype] // 8 or 1
        for side in filter(None, sides.split(",")):
            size *= int(side)
        space = SPACE.search(layout)
        yield Buffer(size, hbm=space is None or space[1] == "0")
