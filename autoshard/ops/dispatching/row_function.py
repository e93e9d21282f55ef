"""A function of rows that each belong to a group, as equations that run on any number of rows.

Experts are such a function: every token of every slot (a token has as many slots as experts) is a row, and its expert
is its group. What the function makes of a row depends on that row and on its group alone. So rows may be in any order
that keeps groups together, and any device may have any of them.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.jaxprs import ClosedJaxpr, JaxprEqn, Literal, Var, aval_of, run


class RowRole(enum.Enum):
    """What an operand or a result of a row function is, outside of it."""

    TOKEN = "token"  # [T, ...]: all slots of a token read one element, and what they make of it is summed up
    SLOT = "slot"  # [T, K, ...]: a row each
    GROUP = "group"  # [G, ...]: one element per group; as a result, a sum over the rows of each group
    SHARED = "shared"  # an array that all rows read


@dataclass(frozen=True, eq=False)
class RowFunction:
    """Equations on rows that are sorted by group.

    Inside, a TOKEN or SLOT operand or result has one dim of rows. So a token that has two experts is two rows.
    """

    equations: tuple[JaxprEqn, ...]
    row_dims: Mapping[Var, int]  # value -> the dim of it that rows are; values without rows are not among them
    inputs: tuple[tuple[Var, RowRole], ...]
    outputs: tuple[tuple[Var, RowRole], ...]
    sizes: Var | None  # how many rows each group has; None if no equation reads it
    lookups: Mapping[Var, Var]  # value of rows -> the array [G, ...] of which each row has its group's element
    sums: Mapping[Var, Var]  # output [G, ...] -> the value of rows that it sums up per group
    slots: int  # K, per token
    groups: int  # G

    @cached_property
    def has_any_rows(self) -> bool:
        """Whether the equations run on another number of rows than the program has: no other parameter says it."""
        try:
            made = self._on_few_rows.out_avals
        except (TypeError, ValueError):  # what JAX raises of operands and parameters that do not fit
            return False
        expected = [self._shape(var, self._few) for var, _ in self.outputs]
        return [one.shape for one in made] == expected

    @property
    def _few(self) -> int:
        return 2 * self.slots

    @cached_property
    def _on_few_rows(self) -> ClosedJaxpr:
        rows = self._few
        read = [jax.ShapeDtypeStruct(self._shape(var, rows), aval_of(var).dtype) for var, _ in self.inputs]
        sizes = jax.ShapeDtypeStruct((self.groups,), "int32")
        return jax.make_jaxpr(lambda sizes, *arrays: self(sizes, arrays, rows))(sizes, *read)

    @cached_property
    def digest(self) -> str:
        """Equal for functions that compute the same, with however many rows they were written."""
        text = str(self._on_few_rows)
        kinds = [kind.value for _, kind in (*self.inputs, *self.outputs)]
        dims = [self.row_dims.get(var) for var, _ in (*self.inputs, *self.outputs)]
        return hashlib.sha256(f"{text} {kinds} {dims} {self.slots} {self.groups}".encode()).hexdigest()[:16]

    def _shape(self, var: Var, rows: int) -> tuple[int, ...]:
        """The shape of a value with so many rows."""
        shape, dim = list(aval_of(var).shape), self.row_dims.get(var)
        if dim is not None:
            shape[dim] = rows
        return tuple(shape)

    def __call__(self, sizes: jax.Array, arrays: Sequence[Any], rows: int, *, wide: bool = False) -> list[Any]:
        """
        Args:
            sizes: ``[G]``: how many rows each group has, in their order. Rows beyond their sum are of no group.
            arrays: the inputs; the dim of rows has any size.
            rows: this size.
            wide: whether sums over the rows of a group are float32, so that others can be added to them.
        """
        sums = {var for var, kind in self.outputs if kind is RowRole.GROUP} if wide else set[Var]()
        values: dict[Var, Any] = dict(zip((var for var, _ in self.inputs), arrays, strict=True))
        if self.sizes is not None:
            values[self.sizes] = sizes.astype(aval_of(self.sizes).dtype)
        group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows), side="right")
        values |= {var: values[array].at[group].get(mode="clip") for var, array in self.lookups.items()}
        for eqn in self.equations:
            operands = [atom.val if isinstance(atom, Literal) else values[atom] for atom in eqn.invars]
            resized = self._resized(eqn, rows)
            if not sums.isdisjoint(eqn.outvars):
                resized = resized.replace(params={**resized.params, "preferred_element_type": _wide(eqn.outvars[0])})
            made = run(resized, operands)
            values |= {var: one for var, one in zip(eqn.outvars, made, strict=True) if isinstance(var, Var)}
        for var, of in self.sums.items():
            x = values[of].astype(_wide(var)) if wide else values[of]
            values[var] = jax.ops.segment_sum(x, group, len(sizes), indices_are_sorted=True)
        return [values[var] for var, _ in self.outputs]

    def _resized(self, eqn: JaxprEqn, rows: int) -> JaxprEqn:
        """An equation whose parameters say another number of rows."""
        var = eqn.outvars[0]
        dim = self.row_dims.get(var)
        if dim is None:
            return eqn
        params: dict[str, Any] = {}
        if eqn.primitive.name == "broadcast_in_dim":
            params = {"shape": self._shape(var, rows)}
        elif eqn.primitive.name == "reshape":
            params = {"new_sizes": self._shape(var, rows)}
        elif eqn.primitive.name == "slice":
            limits = list(eqn.params["limit_indices"])
            limits[dim] = rows
            params = {"limit_indices": tuple(limits)}
        elif eqn.primitive.name == "dynamic_slice":
            params = {"slice_sizes": self._shape(var, rows)}
        return eqn.replace(params={**eqn.params, **params}) if params else eqn


def _wide(var: Any) -> Any:
    return jnp.promote_types(aval_of(var).dtype, jnp.float32)
