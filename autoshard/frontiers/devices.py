"""`fewest_devices`: a step and a chip in, the smallest machine on which it fits out, by bisection."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import AbstractMesh

from autoshard.errors import ArgumentError, MemoryLimitError, SolverError, of_least_need
from autoshard.errors.kinds import checks_kinds
from autoshard.frontiers.traced_variants import FrontierVariants
from autoshard.mesh.chips import CHIPS
from autoshard.options import half_of_time, is_whole_number
from autoshard.program.user_code import shows_users_lines
from autoshard.user_plan import Plan

_HOST = 8  # devices of one host, of chips that no torus joins


@shows_users_lines
@checks_kinds("chip", "kwargs")
def fewest_devices(
    fn: Callable[..., Any],
    *args: Any,
    chip: str,
    axes: Sequence[str] = ("data", "model"),
    most: int = 1024,
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Plan:
    """The plan on the fewest devices with which a step fits: `plan.mesh` has them.

    Numbers of devices are powers of two. It is taken for granted that more devices hold no more each, so they are
    bisected. Of one number, every mesh of these axes is tried, and the fastest plan returned.

    >>> fewest_devices(train_step, state, batch, chip="v5e").mesh.size  # doctest: +SKIP
    16

    Args:
        fn: any function that `jax.jit` takes.
        *args: its positional arguments: pytrees of arrays or ShapeDtypeStructs.
        chip: the kind of device, as the names of machines have it: "v5e", "v5p", "h100". Those of a torus are laid out
            as near to a square or cube as they can, others in hosts of 8.
        axes: names of the mesh axes, one or two.
        most: devices, beyond which nothing is tried.
        kwargs: keyword arguments of `fn`.
        **options: `fixed`, `time_limit`, `ignore_constraints`, `trips`, `microbatches` (a number), `remat`, `tactics`,
            `search` and `memory`, as for `autoshard`, and keywords of `jax.jit`. `memory` is the limit, by default the
            chip's; `time_limit` is that of all plans together: when it ends, the fewest devices known are returned, and
            a warning says so.

    Raises:
        MemoryLimitError: the step does not fit on `most` devices either.
        SolverError: whether it fits there was not found in time. Fewer devices of which it was not found are too few.
        ArgumentError: an option is of the wrong kind.
    """
    _check(chip, axes, most)

    def step_on(mesh: AbstractMesh, machine: str) -> FrontierVariants:
        return FrontierVariants.of(fn, args, kwargs or {}, mesh, machine, options)

    search = _DeviceSearch(chip, axes, step_on)
    low, high = 0, int(math.log2(most))
    best = search.first(high)
    while low < high and isinstance(best, Plan) and not search.is_late:
        middle = (low + high) // 2
        if isinstance(found := search.first(middle), Plan):
            high, best = middle, found
        else:
            low = middle + 1
    if not isinstance(best, Plan):
        raise best
    best = min((best, *search.others(high)), key=lambda plan: plan.cost)
    if low == high and not search.is_late:
        return best
    untried = "other meshes of them" if low == high else f"fewer than {2**high} devices"
    remark = f"fewest_devices: the time limit ended before {untried} were tried."
    return replace(best, warnings=(*best.warnings, remark))


def _check(chip: Any, axes: Any, most: Any) -> None:
    """
    Raises:
        ArgumentError: one of these options of `fewest_devices` is of the wrong kind.
    """
    if chip not in CHIPS:
        raise ArgumentError(f"chip={chip!r}; one of {', '.join(CHIPS)} is needed")
    names = axes if isinstance(axes, list | tuple) else ()
    if not all(isinstance(name, str) for name in names) or not 1 <= len(set(names)) == len(names) <= 2:
        raise ArgumentError(f"axes={axes!r}; the names of one or two mesh axes are needed, as in ('data', 'model')")
    if not is_whole_number(most) or most < 1:
        raise ArgumentError(f"most={most!r}; a number of devices is needed, 1 or more")


class _DeviceSearch:
    """Plans of a step on powers of two of devices, within one time limit."""

    def __init__(self, chip: str, axes: Sequence[str], step_on: Callable[[AbstractMesh, str], FrontierVariants]):
        self._chip, self._axes, self._step_on = chip, axes, step_on
        self._until: float | None = None  # it begins once the step is traced
        self._plans: dict[int, Iterator[Plan]] = {}  # by the power of two

    @property
    def is_late(self) -> bool:
        return self._until is not None and time.monotonic() > self._until

    def first(self, power: int) -> Plan | MemoryLimitError | SolverError:
        """The first plan on so many devices that fits, or why none does."""
        try:
            return next(self.others(power))
        except (MemoryLimitError, SolverError) as error:
            return error

    def others(self, power: int) -> Iterator[Plan]:
        """The plans on so many devices that fit and were not looked at yet."""
        if power not in self._plans:
            self._plans[power] = self._fitting(power)
        return self._plans[power]

    def _fitting(self, power: int) -> Iterator[Plan]:
        """
        Raises:
            MemoryLimitError: no plan on so many devices fits.
            SolverError: none was found in time.
        """
        refused: list[MemoryLimitError] = []
        late: SolverError | None = None
        found = False
        for mesh in _meshes(2**power, self._axes):
            if found and self.is_late:
                return
            step = self._step_on(mesh, machine_of(self._chip, 2**power))
            self._until = step.options.timed().ends if self._until is None else self._until
            step = step.timed(half_of_time(self._until))
            try:
                plan = step.within(step.options.memory).plan
            except MemoryLimitError as error:
                refused.append(error)
            except SolverError as error:
                late = error
            else:
                found = True
                yield plan
        if not found and (late or refused):
            raise late or of_least_need(refused)


def _meshes(devices: int, axes: Sequence[str]) -> Iterator[AbstractMesh]:
    """Every mesh of so many devices, the most even ones first."""
    factors = [2**power for power in range(int(math.log2(devices)) + 1)]
    shapes = [shape for shape in itertools.product(factors, repeat=len(axes)) if math.prod(shape) == devices]
    for shape in sorted(shapes, key=max):
        yield AbstractMesh(shape, tuple(axes))


def machine_of(chip: str, devices: int) -> str:
    """The name of a machine of so many chips, a power of two.

    >>> machine_of("v5e", 8), machine_of("v5p", 16), machine_of("h100", 4), machine_of("h100", 32)
    ('v5e:2x4', 'v5p:2x2x4', 'h100:4', 'h100:4x8')
    """
    dims = CHIPS[chip].torus_dims
    power = int(math.log2(devices))
    if not dims:
        return f"{chip}:{devices}" if devices <= _HOST else f"{chip}:{devices // _HOST}x{_HOST}"
    powers = [(power + i) // dims for i in range(dims)]
    return f"{chip}:{'x'.join(str(2**one) for one in powers)}"
