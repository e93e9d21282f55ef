"""Where each equation runs that comes after the last microbatch: the optimizer of every stage on that stage.

Arrays pull: an equation runs where the largest of its arrays lies, and arrays of state that no microbatch reads, as an
optimizer's moments, lie where the arrays lie that they are combined with. Numbers that are made of several stages, as a
norm of all gradients, are made on one stage, the last. What is made of numbers among the arguments alone, as a learning
rate, every stage computes itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autoshard.jaxprs import JaxprEqn, Var, aval_of, is_array
from autoshard.stages.roles import bytes_of, variables


@dataclass(frozen=True)
class PostLoopGroup:
    """Equations that run as one program: those of one stage that wait for equally many transfers."""

    level: int  # transfers between stages that come before
    stage: int
    equations: tuple[int, ...]


@dataclass(frozen=True)
class PostLoopPlacement:
    """Where equations run, and arguments lie."""

    groups: tuple[PostLoopGroup, ...]  # in an order in which they can run
    floating: frozenset[int]  # equations that every reader computes itself
    homes: Mapping[Var, int]  # argument or piece -> its stage


def is_number(var: Var) -> bool:
    """Whether it holds one element, so that it is no trouble to send it."""
    aval = aval_of(var)
    return not is_array(aval) or all(size == 1 for size in aval.shape)


def post_loop_placement(
    equations: Mapping[int, JaxprEqn],
    located: Mapping[Var, int],
    carried: Sequence[tuple[Var, Var]],
    outside: Collection[Var],
    last: int,
) -> PostLoopPlacement:
    """
    Args:
        equations: those after the last microbatch, and those before the first that they read, by index.
        located: sums, rows, and arguments that microbatches read -> their stage.
        carried: pairs of an argument, or a piece of one, and the value that takes its place.
        outside: arguments, pieces and constants.
        last: the stage that makes numbers of several stages.
    """
    order = sorted(equations)
    inputs = {i: variables(equations[i].invars) for i in order}
    makers = {var: i for i in order for var in equations[i].outvars}
    floating: set[int] = set()
    for i in order:
        is_free = (makers.get(var) in floating or (var in outside and is_number(var)) for var in inputs[i])
        if not equations[i].effects and all(is_free):
            floating.add(i)
    fixed = [i for i in order if i not in floating]
    stages = _pulled(fixed, inputs, equations, located, carried)
    placed: dict[int, int] = {}
    for i in fixed:
        placed[i] = _stage(inputs[i], equations[i], stages, last)
        stages |= dict.fromkeys(equations[i].outvars, placed[i])
    levels: dict[int, int] = {}
    for i in fixed:
        before = [makers[var] for var in inputs[i] if makers.get(var) in placed]
        levels[i] = max((levels[j] + (placed[j] != placed[i]) for j in before), default=0)
    _delay(fixed, inputs, makers, placed, levels)
    grouped: dict[tuple[int, int], list[int]] = {}
    for i in fixed:
        grouped.setdefault((levels[i], placed[i]), []).append(i)
    groups = tuple(PostLoopGroup(level, stage, tuple(found)) for (level, stage), found in sorted(grouped.items()))
    results = dict(carried)
    homes = {var: stages.get(var, stages.get(results.get(var, var), last)) for var in outside}
    return PostLoopPlacement(groups, frozenset(floating), homes)


def _delay(
    fixed: Sequence[int],
    inputs: Mapping[int, Sequence[Var]],
    makers: Mapping[Var, int],
    placed: Mapping[int, int],
    levels: dict[int, int],
) -> None:
    """Puts equations next to their readers: what a program makes for a later one of its stage is held between them."""
    latest: dict[int, int] = {}
    for i in reversed(fixed):
        levels[i] = latest.get(i, levels[i])
        for j in (makers[var] for var in inputs[i] if makers.get(var) in placed):
            latest[j] = min(latest.get(j, levels[i]), levels[i] - (placed[j] != placed[i]))


def _pulled(
    fixed: Sequence[int],
    inputs: Mapping[int, Sequence[Var]],
    equations: Mapping[int, JaxprEqn],
    located: Mapping[Var, int],
    carried: Sequence[tuple[Var, Var]],
) -> dict[Var, int]:
    """The stages of arrays that are combined with others whose stages are known."""
    stages = dict(located)
    arrays = {i: [x for x in (*inputs[i], *variables(equations[i].outvars)) if not is_number(x)] for i in fixed}
    before = -1
    while len(stages) > before:
        before = len(stages)
        for i in (*fixed, *reversed(fixed)):
            known = {stages[var] for var in arrays[i] if var in stages}
            if len(known) == 1:  # where arrays of several stages meet, their readers say where
                stages |= dict.fromkeys(arrays[i], known.pop())
        for argument, result in carried:
            if (argument in stages) != (result in stages):
                stages[argument] = stages[result] = stages.get(argument, stages.get(result, 0))
    return stages


def _stage(inputs: Sequence[Var], eqn: JaxprEqn, stages: Mapping[Var, int], last: int) -> int:
    """Where an equation runs: with its largest array; of numbers alone, where they are all, or on the last stage."""
    arrays = [var for var in (*variables(eqn.outvars), *inputs) if not is_number(var) and var in stages]
    if arrays:
        return stages[max(arrays, key=bytes_of)]
    found = {stages[var] for var in inputs if var in stages}
    return found.pop() if len(found) == 1 else last
