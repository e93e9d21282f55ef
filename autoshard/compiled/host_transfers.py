"""An instruction of a compiled program in, what it moves between a device's memory and its host's out.

XLA writes arrays in the host's memory with the memory space 5. It copies whole arrays, by ``copy`` or from a
``copy-start`` to a ``copy-done``; a TPU program also sends one slice of an array that lies on the host, from a
``dynamic-update-slice-start`` on, and fetches one by a ``dynamic-slice-start``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from autoshard.compiled.module import Instruction, Module, shape_bytes

_ARRAY = re.compile(r"[a-z]+\d*[a-z0-9]*\[[\d,<=]*\](?:\{[^{}]*\})?")
_ON_HOST = re.compile(r"\bS\(5\)")


class HostTransfer(NamedTuple):
    """What one instruction sends to the host's memory, or fetches from there."""

    sends: bool  # to the host
    bytes: int


def host_transfer(module: Module, computation: str, instruction: Instruction) -> HostTransfer | None:
    """What an instruction moves in one run; None if it moves nothing to or from the host.

    >>> shape = "((f32[8,4]{1,0:S(5)}, f32[1,4]{1,0}, s32[]{:T(128)}), f32[8,4]{1,0:S(5)}, u32[]{:S(2)})"
    >>> start = Instruction("d", shape, "dynamic-update-slice-start", "%a, %b, %i)")
    >>> host_transfer(Module({"main": [start]}, "main"), "main", start)
    HostTransfer(sends=True, bytes=16)
    """
    if instruction.opcode == "copy":
        shape = f"({instruction.shape}, {module.operand(instruction, computation).shape})"
    elif instruction.opcode in ("copy-start", "dynamic-slice-start", "dynamic-update-slice-start"):
        shape = instruction.shape
    else:
        return None
    if not _ON_HOST.search(shape):
        return None
    arrays = [array for array in _ARRAY.findall(shape) if "[]" not in array]  # places and states are scalars
    here = [shape_bytes(array) for array in arrays if not _ON_HOST.search(array)]
    if not here or len(here) == len(arrays):
        return None
    is_sent = instruction.opcode == "dynamic-update-slice-start" or bool(_ON_HOST.search(arrays[0]))
    return HostTransfer(is_sent and instruction.opcode != "dynamic-slice-start", max(here))
