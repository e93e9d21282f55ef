"""How long one operation of a compiled GPU program takes: its start, and the roofline of its FLOPs and of its memory.

XLA writes no estimate of its own into programs for GPU. Memory is what an operation reads and writes. A fusion may only
take slices of an array, or only put a slice into one; then the slices count, whatever the fusion casts or transposes
first. FLOPs are those of matrix products and convolutions. Sorts, and libraries' factorizations, take what they take in
plans. FLOPs of other operations do not show next to the memory that these move.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from autoshard.compiled.collectives import KINDS
from autoshard.compiled.module import (
    Instruction,
    Module,
    attribute,
    dims_of,
    dtype_of,
    operands,
    required_attribute,
    shape_bytes,
)
from autoshard.mesh.topology import Topology
from autoshard.model.xla.backends import H100
from autoshard.model.xla.gpu.factorizations import CALLS, LIBRARIES
from autoshard.model.xla.operations import KERNEL_SECONDS

# Opcodes that compute nothing, or whose work is counted in another computation.
_FREE = frozenset({
    "after-all", "bitcast", "call", "conditional", "constant", "get-tuple-element", "opt-barrier", "parameter",
    "partition-id", "replica-id", "tuple", "while",
})  # fmt: skip
_SLICES = ("dynamic-slice", "slice")
_RENAMES = ("bitcast", "convert", "copy", "reshape", "transpose")  # a reader of a part computes this part alone


class Roofline:
    """Seconds of the operations of a module on one device of a machine."""

    def __init__(self, module: Module, topology: Topology):
        self.module, self.topology = module, topology

    def seconds(self, computation: str, instruction: Instruction) -> float:
        """Seconds of one run of an instruction of this computation; 0 for a collective, its start and its end."""
        opcode = instruction.opcode
        if opcode in _FREE or opcode in KINDS or opcode.endswith(("-start", "-done")):
            return 0.0
        moved = sum(self._moved(computation, instruction)) / self.topology.memory_bandwidth
        return KERNEL_SECONDS + max(moved, sum(self._computed(computation, instruction)))

    def _given(self, computation: str, instruction: Instruction) -> list[str]:
        """The shapes of the operands."""
        inside = self.module.inside(computation)
        return [inside[name].shape for name in operands(instruction) if name in inside]

    # Memory.

    def _moved(self, computation: str, instruction: Instruction) -> Iterator[float]:
        """Bytes read and written, array by array."""
        if instruction.opcode != "fusion":
            yield from map(shape_bytes, self._given(computation, instruction))
            scratch = instruction.opcode == "custom-call" and instruction.shape.startswith("(")
            yield shape_bytes(instruction.shape.partition("]")[0] + "]" if scratch else instruction.shape)
            return
        body = required_attribute(instruction.rest, "calls")
        inside = self.module.inside(body)
        yield from (self._read(one, inside) for one in inside.values() if one.opcode == "parameter")
        root = self.module.computations[body][-1]
        for one in [inside[name] for name in operands(root)] if root.opcode == "tuple" else [root]:
            while one.opcode == "bitcast":
                one = inside[operands(one)[0]]
            yield shape_bytes(inside[operands(one)[1]].shape if one.opcode == "dynamic-update-slice" else one.shape)

    def _read(self, given: Instruction, inside: Mapping[str, Instruction]) -> float:
        """Bytes that a fusion reads of its parameter, or of the same elements by another name."""
        whole, read = shape_bytes(given.shape), 0.0
        *_, root = inside.values()
        for one in inside.values():
            if given.name not in operands(one) or not whole:
                continue
            if one.opcode in _SLICES:
                read += whole * math.prod(dims_of(one.shape)) / math.prod(dims_of(given.shape))
            elif one.opcode in _RENAMES and one is not root:
                read += whole * self._read(one, inside) / shape_bytes(one.shape)
            elif one.opcode != "dynamic-update-slice" or operands(one)[0] != given.name:
                return whole
        return min(read, whole)

    # FLOPs.

    def _computed(self, computation: str, instruction: Instruction) -> Iterator[float]:
        """Seconds of each product."""
        if instruction.opcode == "fusion":
            body = required_attribute(instruction.rest, "calls")
            for one in self.module.computations[body]:
                if one.opcode in ("dot", "convolution", "sort"):
                    yield from self._computed(body, one)
            return
        if instruction.opcode == "sort":
            yield self._sort(computation, instruction)
            return
        target = (attribute(instruction.rest, "custom_call_target") or "").strip('"')
        if instruction.opcode == "dot" or "matmul" in target or "gemm" in target:
            flops = self._product(computation, instruction)
        elif (primitive := CALLS.get(target)) is not None:
            shapes = [tuple(dims_of(shape)) for shape in self._given(computation, instruction)]
            yield float(LIBRARIES[primitive].seconds(primitive, shapes))
            return
        elif instruction.opcode == "convolution" or target.startswith("__cudnn$conv"):
            flops = self._convolution(computation, instruction, target)
        else:
            return
        yield flops / self.topology.flops_for(dtype_of(self._given(computation, instruction)[0]))

    def _sort(self, computation: str, instruction: Instruction) -> float:
        """Seconds of a sort, whose operands are all that moves: a stable one has positions among them."""
        given = self._given(computation, instruction)
        dims, along = dims_of(given[0]), re.search(r"dimensions=\{(\d+)\}", instruction.rest)
        assert along is not None, "every sort has one"
        return H100.sorts.of_rows(math.prod(dims), dims[int(along[1])], sum(map(shape_bytes, given)) / math.prod(dims))

    def _product(self, computation: str, instruction: Instruction) -> float:
        left = dims_of(self._given(computation, instruction)[0])
        named = re.search(
            r'lhs_contracting_dim(?:s=\{|ensions":\[)([^\]}]*)', instruction.rest
        )  # an outer product has no contracted dims
        summed = [left[int(n)] for n in re.findall(r"\d+", named[1])] if named else []
        return 2.0 * math.prod(dims_of(instruction.shape)) * math.prod(summed)

    def _convolution(self, computation: str, instruction: Instruction, target: str) -> float:
        """Every element of the result, or of its cotangent, is a sum over the kernel of its channel."""
        first, second, result = *map(dims_of, self._given(computation, instruction)[:2]), dims_of(instruction.shape)
        if target.endswith("BackwardFilter"):
            made, kernel = second, result
        else:
            made, kernel = first if target.endswith("BackwardInput") else result, second
        labels = re.search(r"dim_labels=\w+?_(\w+?)->", instruction.rest)
        assert labels is not None, "every convolution has them"
        return 2.0 * math.prod(made) * math.prod(kernel) / kernel[labels[1].index("o")]
