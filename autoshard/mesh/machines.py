"""A machine's name in, its chip and shape out: ``"v5e:4x4"``, ``"2x v5e:4x4"``, ``"h100:2x8"``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from autoshard.errors import MeshError
from autoshard.errors.kinds import checks_kinds
from autoshard.mesh.chips import CHIPS

_NAME = re.compile(r"(?:(\d+)\s*x\s*)?(?:tpu\s*)?([a-z0-9]+):(\d+(?:x\d+)*)")


@dataclass(frozen=True)
class Machine:
    """A machine as its name says it; `str` gives the name."""

    chip: str  # a key of CHIPS
    slices: int  # what the network joins: TPU slices, or hosts
    dims: tuple[int, ...]  # chips along each dim of a slice's torus; devices of a host in one dim

    def __str__(self) -> str:
        shape = "x".join(map(str, self.dims))
        if CHIPS[self.chip].torus_dims:
            return f"{self.slices} x {self.chip}:{shape}" if self.slices > 1 else f"{self.chip}:{shape}"
        return f"{self.chip}:{self.slices}x{shape}" if self.slices > 1 else f"{self.chip}:{shape}"

    @property
    def axes(self) -> dict[str, int]:
        """Its dims in JAX devices, outermost first: x, y, z, w, and before them `slice` for several slices of TPUs."""
        chip = CHIPS[self.chip]
        several = [self.slices] if self.slices > 1 else []
        cores = [chip.cores] if chip.cores > 1 else []
        if chip.torus_dims:
            return dict(zip(["slice"] * len(several) + list("xyzw"), [*several, *self.dims, *cores], strict=False))
        return dict(zip("xy", [*several, *self.dims], strict=False))


def is_machine(words: str) -> bool:
    """Whether words have the form of a machine's name, as ``"v5e:4x4"`` has and ``"v5e"``, a chip, has not."""
    return _NAME.fullmatch(words.strip().lower()) is not None


@checks_kinds()
def parse_machine(name: str) -> Machine:
    """What the name of a machine says.

    Args:
        name: of TPUs the slices if there are several, the chip, the torus: ``"v5e:4x4"``, ``"2x v5e:4x4"``,
            ``"tpu7x:2x2x1"``; of others the hosts if there are several, and the devices of one: ``"h100:8"``,
            ``"h100:2x8"``.

    Raises:
        MeshError: no machine has this name.

    >>> parse_machine("2x7x:2x2x1")
    Machine(chip='7x', slices=2, dims=(2, 2, 1))
    >>> parse_machine("h100:2x8")
    Machine(chip='h100', slices=2, dims=(8,))
    """
    match = _NAME.fullmatch(name.strip().lower())
    slices, chip_name, shape = match.groups() if match else (None, "", "")
    dims = tuple(int(part) for part in shape.split("x")) if match else ()
    if chip_name not in CHIPS or 0 in dims or int(slices or 1) == 0:
        chips = ", ".join(CHIPS)
        raise MeshError(
            f"no machine {name!r}; write chip:shape, as in 'v5e:4x4', '2x v5e:4x4' (slices) or 'h100:2x8' (hosts), "
            f"chip one of {chips}"
        )
    chip = CHIPS[chip_name]
    if not chip.torus_dims:
        if slices is not None or len(dims) > 2:
            raise MeshError(f"no machine {name!r}; write hosts and devices per host after the chip: '{chip_name}:2x8'")
        return Machine(chip_name, dims[0] if len(dims) == 2 else 1, dims[-1:])
    if len(dims) > chip.torus_dims:
        raise MeshError(f"no machine {name!r}; the torus of {chip_name} has {chip.torus_dims} dims, not {len(dims)}")
    return Machine(chip_name, int(slices or 1), dims)
