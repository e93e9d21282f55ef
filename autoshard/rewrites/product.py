"""Contractions with a label per dim: `dot_general` as rewrites see it, and arrays contracted by labels."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.jaxprs import JaxprEqn, Literal, Var, aval_of

Atom = Var | Literal
Label = Hashable  # of a dim; dims of two operands with one label are multiplied


@dataclass(frozen=True)
class Operand:
    """An array of a contraction, and the label of each of its dims."""

    atom: Atom
    labels: tuple[Label, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dims of the array."""
        shape: tuple[int, ...] = aval_of(self.atom).shape
        return shape

    @property
    def sizes(self) -> dict[Label, int]:
        """Label -> elements."""
        return dict(zip(self.labels, self.shape, strict=True))

    def renamed(self, names: Mapping[Label, Label]) -> Operand:
        """The same array with other labels."""
        return Operand(self.atom, tuple(names.get(label, label) for label in self.labels))


@dataclass(frozen=True, eq=False)
class Product:
    """A product of two arrays, summed over the labels that its result does not have.

    A label that both operands and the result have is a batch dim. A label of one operand alone is in the result.
    """

    eqn: JaxprEqn  # whose precision and accumulation it has
    left: Operand
    right: Operand
    result: tuple[Label, ...]

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Product:
        """A `dot_general`. Dims of the result are labelled by their place, contracted ones ``("sum", i)``.

        >>> eqn = jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 4))).eqns[-1]
        >>> product = Product.of(eqn)
        >>> product.left.labels, product.right.labels, product.result
        ((0, ('sum', 0)), (('sum', 0), 1), (0, 1))
        """
        (contracted, batched) = eqn.params["dimension_numbers"]
        names: list[dict[int, Label]] = [{}, {}]
        for side in range(2):
            names[side].update((dim, i) for i, dim in enumerate(batched[side]))
            names[side].update((dim, ("sum", i)) for i, dim in enumerate(contracted[side]))
        place = len(batched[0])
        operands = list[Operand]()
        for side, atom in enumerate(eqn.invars):
            for dim in range(len(aval_of(atom).shape)):
                if dim not in names[side]:
                    names[side][dim] = place
                    place += 1
            operands.append(Operand(atom, tuple(names[side][dim] for dim in sorted(names[side]))))
        left, right = operands
        return cls(eqn, left, right, tuple(range(place)))

    @property
    def out(self) -> Var:
        """The variable of the result."""
        out: Var = self.eqn.outvars[0]
        return out

    @property
    def operands(self) -> tuple[Operand, Operand]:
        """The left and the right operand."""
        return self.left, self.right

    @property
    def how(self) -> tuple[Any, ...]:
        """What two products must have in common to be computed as one: precision, and dtypes of operands and result."""
        params = self.eqn.params
        dtypes = tuple(aval_of(one.atom).dtype for one in self.operands)
        return params["precision"], params["preferred_element_type"], *dtypes

    @property
    def is_plain(self) -> bool:
        """Whether it has floating or complex operands of one dtype, its result has it too, and no layout is ordered."""
        dtypes = {aval_of(self.out).dtype, *(aval_of(one.atom).dtype for one in self.operands)}
        return (
            len(dtypes) == 1
            and jnp.issubdtype(next(iter(dtypes)), jnp.inexact)
            and self.eqn.params.get("out_sharding") is None
        )

    @property
    def sizes(self) -> dict[Label, int]:
        """Label -> elements."""
        return self.left.sizes | self.right.sizes

    def renamed(self, names: Mapping[Label, Label]) -> Product:
        """The same product with other labels."""
        result = tuple(names.get(label, label) for label in self.result)
        return Product(self.eqn, self.left.renamed(names), self.right.renamed(names), result)

    def contract(
        self,
        left: Any,
        left_labels: Sequence[Label],
        right: Any,
        right_labels: Sequence[Label],
        out: Sequence[Label],
        dtype: Any = None,
    ) -> Any:
        """Two arrays contracted with this product's precision and accumulation; `dtype` as for `contracted`."""
        return contracted(self.eqn, left, left_labels, right, right_labels, out, dtype)


def contracted(
    like: JaxprEqn, left: Any, left_labels: Sequence[Label], right: Any, right_labels: Sequence[Label],
    out: Sequence[Label], dtype: Any = None,
) -> Any:  # fmt: skip
    """Two arrays multiplied and summed over the labels that `out` lacks.

    Args:
        like: the `dot_general` whose precision and accumulation are used.
        out: labels of the result, in its order.
        dtype: of the result; None: that of `like`.

    Returns:
        An array with a dim per label of `out`.
    """
    shared = [label for label in left_labels if label in right_labels]
    batch = [label for label in out if label in shared]
    summed = [label for label in shared if label not in out]
    left_labels, right_labels = list(left_labels), list(right_labels)
    frees = [[label for label in labels if label not in shared] for labels in (left_labels, right_labels)]
    if list(out) == [*batch, *frees[1], *frees[0]] and frees[0] and frees[1]:
        left, left_labels, right, right_labels = right, right_labels, left, left_labels
        frees.reverse()
    dims = [tuple(tuple(map(labels.index, some)) for labels in (left_labels, right_labels)) for some in (summed, batch)]
    params = like.params
    made = jax.lax.dot_general(
        left,
        right,
        (dims[0], dims[1]),  # type: ignore[arg-type]
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"] if dtype is None else dtype,
    )
    return ordered(made, [*batch, *frees[0], *frees[1]], out)


def ordered(array: Any, labels: Sequence[Label], wanted: Sequence[Label]) -> Any:
    """An array with its dims in another order."""
    order = [list(labels).index(label) for label in wanted]
    return array if order == sorted(order) else jax.lax.transpose(array, order)
