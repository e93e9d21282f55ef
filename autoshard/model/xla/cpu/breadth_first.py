"""When XLA for CPU runs what: groups in program order in, the points from which each holds what it makes out.

Of each computation (the program, and the body of each loop) XLA runs first what is ready first (`BFScheduler` of
xla/hlo/transforms). So what is made of arguments in few steps, as slices and casts of weights, masks and random bits,
is made at the start and held until its reader runs. What `jax.checkpoint` computes again is made beside the forward
pass. `tests/model/test_breadth_first.py` compiles some.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoshard.model.groups import Group
from autoshard.program import Equation, Program, Value

_Loop = tuple[int, int]  # index of its first equation, and one past its last
_Node = int | _Loop  # a group by its index, an equation of one by its index below zero, or a loop as one operation


@dataclass(frozen=True)
class ReadyPoints:
    """Program points, at most those at which groups run in the order of the program."""

    made: Sequence[int]  # per group: from which it holds what it makes
    ahead: Mapping[int, int]  # equation index -> from which it holds what it works on


def ready_points(
    groups: Sequence[Group], points: Sequence[int], passed: Sequence[bool], apart: Container[str]
) -> ReadyPoints:
    """When groups, and what they are made of, are ready.

    Args:
        groups: all groups, in program order.
        points: `Group.point` of each.
        passed: per group, whether it is no operation of its own, as its readers compute it again.
        apart: primitives that are made in operations of their own before the group that they are part of.
    """
    around = _loops_around(groups)
    homes = [around(points[group.index]) for group in groups]
    makers = {made.value.id: group.index for group in groups for made in group.outputs}
    nodes = defaultdict[tuple[_Loop, ...], dict[_Node, int]](dict)  # per computation: node -> when it starts
    edges = defaultdict[tuple[_Loop, ...], dict[tuple[_Node, _Node], None]](dict)

    def needs(values: Iterator[Value], reader: _Node, group: Group) -> None:
        for maker in {makers[value.id] for value in values if value.id in makers} - {group.index}:
            shared = _common(homes[maker], homes[group.index])
            is_loop = homes[group.index] != shared
            ends = _node(maker, homes[maker], len(shared)), homes[group.index][len(shared)] if is_loop else reader
            ends_turn = group.equations[0].primitive == "scan_carry" and maker > group.index
            if ends[0] != ends[1] and not ends_turn:
                edges[shared][ends] = None

    for group in groups:
        home, index = homes[group.index], group.index
        for depth, loop in enumerate(home):
            nodes[home[:depth]][loop] = loop[0]
        nodes[home][index] = points[index]
        needs((use.value for use in group.uses), index, group)
        for equation in (one for one in group.equations if one.primitive in apart):
            nodes[home][~equation.index] = points[index]
            edges[home][~equation.index, index] = None
            needs(_read_for(equation, group), ~equation.index, group)
    early = _made_of_arguments(groups, homes, makers)
    made, ahead = list(points), dict[int, int]()
    for home, starts in nodes.items():
        is_passed: set[_Node] = {node for node in starts if isinstance(node, int) and node >= 0 and passed[node]}
        order = _breadth_first(list(starts), edges[home], is_passed)
        later = math.inf
        for node in reversed(order):
            point = int(min(starts[node], later))
            if isinstance(node, int) and node < 0:
                ahead[~node] = point
            elif node in early:
                made[node] = point
            later = min(later, starts[node])
    return ReadyPoints(made, ahead)


def recomputed_from(program: Program, groups: Sequence[Group]) -> list[int]:
    """Per group, the index of the first equation of the `jax.checkpoint` whose backward pass it is part of, or 0.

    XLA drops barriers before it schedules. So what such a backward pass computes again waits for no cotangent, and runs
    beside the forward pass that made it first. Without barriers XLA merges the two.
    """
    first, innermost = dict[tuple, int](), list[tuple]()  # path of a backward pass -> its first equation; per equation
    for equation in program.equations:
        paths = (equation.path[:end] for end in range(len(equation.path), 0, -1)) if program.backward else ()
        innermost.append(next((path for path in paths if path in program.backward), ()))
        first.setdefault(innermost[-1], equation.index)
    first[()] = 0
    return [first[innermost[group.equations[-1].index]] for group in groups]


def _read_for(equation: Equation, group: Group) -> Iterator[Value]:
    """What a group reads from outside for one of its equations. Positions, which poolings look up, read nothing."""
    if equation.primitive == "select_and_scatter_add":
        return
    inside = {made.id: one for one in group.equations for made in one.outputs}
    seen, open_ = set[int](), [equation]
    while open_:
        for value in open_.pop().inputs:
            if isinstance(value, Value) and value.id not in seen:
                seen.add(value.id)
                if value.id in inside:
                    open_.append(inside[value.id])
                else:
                    yield value


def _made_of_arguments(
    groups: Sequence[Group], homes: Sequence[tuple[_Loop, ...]], makers: Mapping[int, int]
) -> set[int]:
    """The groups that no product waits for, nor loop: they read what their computation is given, or such groups.

    What follows on products is left where it stands in the program: so are its readers, whatever XLA takes first. What
    stands in a branch runs when all that the branch reads is there.
    """
    found = set[int]()
    for group in groups:
        read, home = (makers.get(use.value.id) for use in group.uses), homes[group.index]
        near = (maker for maker in read if maker is not None and homes[maker][: len(home)] == home)
        is_branch = group.equations[0].primitive in ("branch_const", "branch_join")
        if not (group.contracts or is_branch) and all(maker in found for maker in near):
            found.add(group.index)
    return found


def _breadth_first(
    nodes: Sequence[_Node], edges: Mapping[tuple[_Node, _Node], None], passed: set[_Node]
) -> list[_Node]:
    """The nodes in the order in which they are ready; those that are passed count as no step."""
    after, waits = defaultdict[_Node, list[_Node]](list), dict.fromkeys(nodes, 0)
    for source, target in edges:
        after[source].append(target)
        waits[target] += 1
    queue, order = deque(node for node in nodes if not waits[node]), list[_Node]()
    while queue:
        node = queue.popleft()
        order.append(node)
        for target in after[node]:
            waits[target] -= 1
            if not waits[target]:
                (queue.appendleft if target in passed else queue.append)(target)
    return order


def _loops_around(groups: Sequence[Group]) -> Callable[[int], tuple[_Loop, ...]]:
    """What tells the loops around a program point, the outermost first."""
    loops = sorted({one.loop for group in groups for one in group.equations if one.loop}, key=lambda x: (x[0], -x[1]))
    starts, paths, path = list[int](), list[tuple[_Loop, ...]](), list[_Loop]()
    for loop in loops:
        while path and path[-1][1] <= loop[0]:
            path.pop()
        path.append(loop)
        starts.append(loop[0])
        paths.append(tuple(path))

    def around(point: int) -> tuple[_Loop, ...]:
        place = bisect.bisect_right(starts, point) - 1
        return tuple(one for one in paths[place] if point < one[1]) if place >= 0 else ()

    return around


def _common(one: tuple[_Loop, ...], other: tuple[_Loop, ...]) -> tuple[_Loop, ...]:
    """The loops around both."""
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    return one[:shared]


def _node(group: int, home: tuple[_Loop, ...], depth: int) -> _Node:
    """What a group is part of, as seen from inside so many of the loops around it."""
    return group if depth == len(home) else home[depth]
