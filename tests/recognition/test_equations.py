"""Equations keep their order through edits, whatever is put where, and an edit that has no order changes nothing."""

from __future__ import annotations

import itertools
import random

import jax
import jax.numpy as jnp
import pytest

from autoshard.jaxprs import JaxprEqn, Var
from autoshard.recognition.equations import Equations, UnavailableValue

(LIKE,) = jax.make_jaxpr(jnp.sin)(1.0).jaxpr.eqns


def equation(read: list[Var], made: Var) -> JaxprEqn:
    return LIKE.replace(invars=read, outvars=[made])


def var() -> Var:
    return Var(LIKE.outvars[0].aval)


def is_in_order(equations: Equations) -> bool:
    """Whether each stands behind what makes its operands, by the list alone."""
    listed = list(equations)
    place = {eqn.outvars[0]: i for i, eqn in enumerate(listed)}
    return all(place.get(x, -1) < i for i, eqn in enumerate(listed) for x in eqn.invars)


def leads_to(equations: Equations, before: set[Var]) -> set[Var]:
    """What is made of some variables, in all steps."""
    found = set(before)
    for _ in range(len(equations)):
        found |= {eqn.outvars[0] for eqn in equations if found.intersection(eqn.invars)}
    return found - before


@pytest.mark.parametrize("seed", range(8))
def test_edits_keep_the_order_or_change_nothing(seed: int) -> None:
    """Some equations are replaced by others that read anything; a cycle is refused, and nothing else is."""
    rng, outcomes = random.Random(seed), []
    made, equations = [var()], Equations()
    for _ in range(30):
        equations.append(equation(rng.sample(made, min(2, len(made))), var()))
        made.append(list(equations)[-1].outvars[0])
    for _ in range(40):
        listed = list(equations)
        gone = rng.sample(listed, 2)
        operands = rng.sample(made, 2)
        middle, ends = var(), [eqn.outvars[0] for eqn in gone]
        new = [equation(operands, middle), *(equation([middle], end) for end in ends)]
        is_cycle = not (leads_to(equations, set(ends)) | set(ends)).isdisjoint(operands)
        outcomes.append(is_cycle)
        if is_cycle:
            with pytest.raises(UnavailableValue):
                equations.exchange(gone, new)
            assert list(equations) == listed
        else:
            equations.exchange(gone, new)
            assert {*map(id, equations)} == {*map(id, listed), *map(id, new)} - {*map(id, gone)}
            made.append(middle)
        assert is_in_order(equations)
        assert all(equations.makers[eqn.outvars[0]] is eqn for eqn in equations)
        for one in made:
            assert equations.readers(one) == [eqn for eqn in equations if one in eqn.invars]
    assert set(outcomes) == {True, False}


def test_what_the_new_equations_read_is_moved_before_them() -> None:
    """`late` stands behind the reader of `old`, and is brought before it; what nobody reads goes to the end."""
    x, old, late, end, middle, unread = (var() for _ in range(6))
    equations = Equations()
    for eqn in (equation([x], old), equation([old], end), equation([x], late)):
        equations.append(eqn)
    gone = next(iter(equations))
    equations.exchange([gone], [equation([late], middle), equation([middle], old), equation([middle], unread)])
    assert [eqn.outvars[0] for eqn in equations] == [late, middle, old, end, unread]


def test_an_edit_costs_what_it_moves() -> None:
    """The same edit in the middle of a chain of any length looks at as many equations."""
    counts = []
    for length in (100, 1000):
        chain, equations = [var() for _ in range(length)], Equations()
        for before, after in itertools.pairwise(chain):
            equations.append(equation([before], after))
        looked = 0
        plain = Equations._stands_before

        def counted(*args: object, plain: object = plain) -> bool:
            nonlocal looked
            looked += 1
            return plain(*args)  # type: ignore[operator]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Equations, "_stands_before", counted)
            middle = list(equations)[length // 2]
            equations.exchange([middle], [equation(middle.invars, middle.outvars[0])])
        counts.append(looked)
    assert counts[0] == counts[1] > 0
