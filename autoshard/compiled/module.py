"""The text of a compiled HLO module, as instructions: what runs what, and how often.

A loop body runs as often as the loop turns; when XLA does not know how often, once. Of some loops the only bound is the
largest integer, which says as little. XLA also writes that for cycles that it has not estimated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.errors import MeshError

# "  ROOT %name = f32[8,4]{1,0} all-gather(..."; a shape holds no lower-case word before a parenthesis
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>\S+) = (?P<shape>.+?) (?P<opcode>[a-z][a-z0-9-]*)\((?P<rest>.*)$")
_ARRAY = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\]")
_NO_FIGURE = 2**31 - 1  # the largest int32: no loop of ours turns as often, and no operation takes as many cycles
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[^\s(]+) (?:\(.*\) -> .* )?\{$")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    rest: str  # operands and attributes, from the opening parenthesis on

    @property
    def cycles(self) -> int:
        """For how many cycles XLA expects a TPU to compute; 0 on CPU and GPU, and where XLA has no figure."""
        return 0 if self.is_unestimated else self._noted_cycles

    @property
    def is_unestimated(self) -> bool:
        """Whether XLA writes the largest integer for its cycles, since it does not know them."""
        return self._noted_cycles >= _NO_FIGURE

    @property
    def has_estimate(self) -> bool:
        """Whether XLA writes cycles at all."""
        return '"estimated_cycles"' in self.rest

    @property
    def _noted_cycles(self) -> int:
        match = re.search(r'"estimated_cycles":"(\d+)"', self.rest)
        return int(match[1]) if match else 0


@dataclass(frozen=True)
class Module:
    """A module's computations: name -> instructions."""

    computations: Mapping[str, Sequence[Instruction]]
    entry: str
    turns: dict[str, int] = field(default_factory=dict)  # body of a loop -> how often it runs in a run of the loop
    callers: dict[str, tuple[str, Instruction]] = field(default_factory=dict)  # computation -> what runs it, and where
    named: dict[str, Mapping[str, Instruction]] = field(default_factory=dict)  # computation -> by name, once asked for
    endless: set[str] = field(default_factory=set)  # bodies and conditions of loops that turn nobody knows how often

    @classmethod
    def of(cls, hlo_text: str) -> Module:
        computations: dict[str, list[Instruction]] = {}
        entry = current = None
        for line in hlo_text.splitlines():
            if match := _COMPUTATION.match(line):
                current = computations.setdefault(match["name"], [])
                if match["entry"]:
                    entry = match["name"]
            elif line == "}":
                current = None
            elif current is not None and (match := _INSTRUCTION.match(line)):
                current.append(Instruction(**match.groupdict()))
        if entry is None:
            raise MeshError("this text has no ENTRY computation; it is not that of a compiled HLO module")
        return cls(computations, entry)

    def executed(self) -> Iterator[tuple[str, Instruction, int]]:
        """(computation, instruction, how often it runs), in program order; reducers and the like are left out."""

        def below(computation: str, runs: int) -> Iterator[tuple[str, Instruction, int]]:
            for instruction in self.computations[computation]:
                yield computation, instruction, runs
                for callee, times in self.callees(instruction):
                    self.callers[callee] = computation, instruction
                    yield from below(callee, runs * times)

        return below(self.entry, 1)

    def outermost(self, computation: str, instruction: Instruction) -> tuple[str, Instruction]:
        """The instruction that runs this one, as part of a fusion say, in a computation that runs by itself."""
        *_, outermost = (computation, instruction), *self.around(computation)
        return outermost

    def around(self, computation: str) -> Iterator[tuple[str, Instruction]]:
        """The instructions that a computation is part of, and theirs, up to those of one that runs by itself."""
        while computation in self.callers and self.callers[computation][1].opcode not in ("conditional", "while"):
            computation, instruction = self.callers[computation]
            yield computation, instruction

    def inside(self, computation: str) -> Mapping[str, Instruction]:
        """The instructions of a computation by their names."""
        if computation not in self.named:
            self.named[computation] = {one.name: one for one in self.computations[computation]}
        return self.named[computation]

    def operand(self, instruction: Instruction, computation: str) -> Instruction:
        """The instruction that makes another's first operand; that other one if it is made in another computation."""
        name = next(iter(operands(instruction)), None)
        return instruction if name is None else self.inside(computation).get(name, instruction)

    def callees(self, instruction: Instruction) -> Iterator[tuple[str, int]]:
        """The computations an instruction runs, and how often each."""
        if instruction.opcode == "while":
            condition, body = (
                required_attribute(instruction.rest, "condition"),
                required_attribute(instruction.rest, "body"),
            )
            trips = self.trips(instruction, condition, body)
            if trips is None:
                self.endless.update((condition, body))
            turns = self.turns[body] = 1 if trips is None else trips
            yield from ((condition, turns), (body, turns))
        elif instruction.opcode == "conditional":
            branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.rest)
            if branches:
                names = [name.strip().lstrip("%") for name in branches[1].split(",")]
            else:
                names = [required_attribute(instruction.rest, f"{which}_computation") for which in ("true", "false")]
            yield from ((name, 1) for name in names)
        elif instruction.opcode.removesuffix("-start") in ("async", "call", "fusion"):
            yield attribute(instruction.rest, "to_apply") or required_attribute(instruction.rest, "calls"), 1

    def is_in_endless_loop(self, computation: str) -> bool:
        """Whether a computation that has been reached is part of a loop that turns nobody knows how often."""
        while computation not in self.endless and computation in self.callers:
            computation, _ = self.callers[computation]
        return computation in self.endless

    def trips(self, loop: Instruction, condition: str, body: str) -> int | None:
        """How often a loop runs: XLA's note, or the constant that alone bounds its counter; None if neither says."""
        if known := re.search(r'"?known_trip_count"?[:=]\s*\{"?n"?[:=]\s*"?(\d+)', loop.rest):
            return int(known[1])
        if self.ending(condition).opcode != "compare":  # something else may end the loop before the counter does
            return None
        compare = list(self.computations[condition])
        for fusion in [instruction for instruction in compare if instruction.opcode == "fusion"]:
            compare += self.computations[required_attribute(fusion.rest, "calls")]
        limits = [number for i in compare if (number := _scalar(i)) is not None]
        directions = [attribute(i.rest, "direction") for i in compare if i.opcode == "compare"]
        if len(limits) != 1 or len(directions) != 1 or directions[0] not in ("LT", "LE"):
            return None
        last = limits[0] + (directions[0] == "LE")
        return -(-last // self.step(condition, body)) if last < _NO_FIGURE else None

    def ending(self, computation: str) -> Instruction:
        """What makes the result of a computation, inside of fusions."""
        last = self.computations[computation][-1]
        return self.ending(required_attribute(last.rest, "calls")) if last.opcode == "fusion" else last

    def step(self, condition: str, body: str) -> int:
        """What a loop adds to its counter in each turn; XLA unrolls some loops by two."""
        tests = self.computations[condition]
        counters = {required_attribute(i.rest, "index") for i in tests if i.opcode == "get-tuple-element"}
        inside = self.inside(body)
        root = self.computations[body][-1]
        if len(counters) != 1 or root.opcode != "tuple":
            return 1
        handed_on = inside.get(operands(root)[int(counters.pop())])
        if handed_on is None or handed_on.opcode != "add":
            return 1
        steps = [_scalar(inside[name]) for name in operands(handed_on) if name in inside]
        return next((step for step in steps if step), 1)


def _scalar(instruction: Instruction) -> int | None:
    """The value of an integer constant."""
    if instruction.opcode != "constant" or not re.match(r"[su](8|16|32|64)\[\]", instruction.shape):
        return None
    return int(instruction.rest.split(")")[0])


def attribute(rest: str, key: str) -> str | None:
    match = re.search(rf"\b{key}=%?([^\s,)}}]+)", rest)
    return match[1] if match else None


def required_attribute(rest: str, key: str) -> str:
    """An attribute that is there."""
    found = attribute(rest, key)
    assert found is not None, f"{key} is part of: {rest[:200]}"
    return found


def operands(instruction: Instruction) -> list[str]:
    return re.findall(r"%([^\s,()]+)", instruction.rest.partition(")")[0])


def shape_bytes(shape: str) -> int:
    """Bytes of all arrays of a shape, whatever its nesting."""
    return sum(-(-_bits(dtype) * math.prod(_numbers(dims)) // 8) for dtype, dims in _ARRAY.findall(shape))


def max_elements(shape: str) -> int:
    """Elements of the largest array of a shape, whatever its nesting.

    >>> max_elements("(f32[8,4]{1,0}, pred[])")
    32
    """
    return max((math.prod(_numbers(dims)) for _, dims in _ARRAY.findall(shape)), default=0)


def dims_of(shape: str) -> list[int]:
    """The dims of the first array of a shape.

    >>> dims_of("(bf16[8192,3072]{1,0}, s8[33554432]{0})")
    [8192, 3072]
    """
    array = _ARRAY.search(shape)
    assert array is not None, f"{shape} has an array"
    return _numbers(array[2])


def dtype_of(shape: str) -> str:
    """The dtype of the first array of a shape, as NumPy calls it.

    >>> dtype_of("bf16[8]{0}"), dtype_of("pred[]"), dtype_of("f8e4m3fn[2]")
    ('bfloat16', 'bool', 'float8_e4m3fn')
    """
    array = _ARRAY.search(shape)
    assert array is not None, f"{shape} has an array"
    parts = re.match(r"([a-z]+)(\d*)(\w*)", array[1])
    assert parts is not None, "`_ARRAY` begins so"
    kind, bits, rest = parts.groups()
    return (
        {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex", "pred": "bool"}[kind]
        + bits
        + (f"_{rest}" if rest else "")
    )


def _numbers(dims: str) -> list[int]:
    return [int(n) for n in dims.replace("<=", "").split(",") if n]


def _bits(dtype: str) -> int:
    """Bits of one element: "bf16", "f8e4m3fn" and "c64" name theirs; pred takes a byte, a token nothing."""
    if match := re.match(r"[a-z]+?(\d+)", dtype):
        return int(match[1])
    return 8 if dtype == "pred" else 0
