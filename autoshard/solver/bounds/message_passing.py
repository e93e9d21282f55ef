"""A `Problem` in, a proven lower bound and choices near it out: sequential tree-reweighted message passing (TRW-S).

Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", PAMI 2006: every edge carries a
message to each of its ends, a share of its costs that the end's options pay instead. Sweeps over the nodes in order,
forward and backward, move costs to where they bind, and what no choice can avoid is the bound. Memory enters as a price
per byte at each pressure point: a choice that fits earns what its bytes fall short of the limit.

Nodes are coloured such that no two with an edge have one colour, and go colour by colour: NumPy deals with all nodes of
a colour at once, and the bound rises as fast as in the order of the program.

Costs written with these messages say more than one number: how much dearer than the bound any choice with a given
option must be. Options that make it dearer than a choice in hand can be forbidden.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autoshard.solver.bounds.edge_blocks import ClassedEdge, EdgeBlock, blocks_of, edges_of
from autoshard.solver.bounds.prices import Prices
from autoshard.solver.bounds.settings import RELAXATION, SWEEP, RelaxationSettings
from autoshard.solver.bounds.weighted_sums import WeightedSums
from autoshard.solver.problem import Edge, Problem
from autoshard.solver.symmetry.lifted_problem import ALONE, LiftedProblem, unlifted_problem


@dataclass
class Role:
    """Edges of a node whose messages to it are one."""

    node: int
    times: float = 0.0  # how many of them one of the nodes that it stands for has
    ends: set[int] = field(default_factory=set)  # which ends of its edges it is
    slots: list[range] = field(default_factory=list)  # edge -> its messages


class ColourClass:
    """Nodes without an edge among them: their options stand together, and a sweep deals with all of them at once."""

    def __init__(self, nodes: np.ndarray, times: np.ndarray, sizes: np.ndarray, start: int):
        self.nodes = nodes
        self.times = times[nodes]  # how many nodes each stands for
        self.options = slice(start, start + int(sizes[nodes].sum()))
        self.starts = _starts(sizes[nodes])  # node -> its first option among these
        self.owner = np.repeat(np.arange(len(nodes)), sizes[nodes])  # option -> its node
        self.blocks: tuple[list[EdgeBlock], list[EdgeBlock]] = (
            [],
            [],
        )  # those in which these nodes are the one or other end
        self.slots = [slice(0), slice(0)]  # the messages to these nodes over them
        self.members = [np.zeros(0, dtype=np.int64)] * 2  # options, class by class in the order of these slots
        self.class_starts = [np.zeros(0, dtype=np.int64)] * 2  # slot -> where its options start among them
        self.roles: list[np.ndarray] = []  # slots of messages that are one, [role, edge, class]; those of one shape
        # [option, slot of all messages]: where it is of the class, how many edges one node has of those it stands for
        self.spread: WeightedSums
        self.share = np.zeros(0)  # option -> of what its node has left, what one edge gets

    def least(self, costs: np.ndarray, end: int) -> np.ndarray:
        """Per slot at this end, the least of its options' costs."""
        return np.minimum.reduceat(costs[self.members[end]], self.class_starts[end])


class Relaxation:
    """Messages over the edges of a problem, and prices on its memory, that together prove a bound.

    >>> from autoshard.solver.problem import Edge
    >>> problem = Problem((np.array([0.0, 3.0]),) * 2, (Edge(0, 1, np.array([[4.0, 0.0], [0.0, 9.0]])),), (), None)
    >>> Relaxation(problem).sweep()
    3.0

    Every option must have a finite cost, and a finite pair over every edge; `simplify` sees to that. For a
    `LiftedProblem` the bounds of `sweep` are those of what it stands for; all else means nothing.
    """

    def __init__(self, problem: Problem | LiftedProblem, settings: RelaxationSettings = RELAXATION):
        self.settings = settings
        lifted = problem if isinstance(problem, LiftedProblem) else unlifted_problem(problem)
        self.problem = problem = lifted.problem
        self._rest = lifted.rest
        sizes = np.array([len(costs) for costs in problem.costs])
        colour_of = lifted.colours
        order = np.argsort(colour_of, kind="stable")
        # where each option stands in the problem, in the order of colours
        self._place = np.repeat(_starts(sizes)[order], sizes[order]) + _places_within(sizes[order])
        places = np.split(order, np.cumsum(np.bincount(colour_of))[:-1])
        starts = _starts(np.array([sizes[nodes].sum() for nodes in places]))
        self._colours = [
            ColourClass(nodes, lifted.node_times, sizes, int(start))
            for nodes, start in zip(places, starts, strict=True)
        ]
        self._first_option = np.empty(len(sizes), dtype=np.int64)
        self._first_option[order] = _starts(sizes[order])
        self._add_edges(edges_of(lifted, colour_of), lifted.node_times, colour_of)
        blocks = [block for colour in self._colours for block in colour.blocks[0]]
        entries = sum(math.prod(block.tables[0].shape[:2]) * len(block.edges) for block in blocks)
        self.seconds = (  # about what a sweep takes on a quiet core
            SWEEP.seconds_per_entry * entries
            + SWEEP.seconds_per_message * len(self._messages)
            + SWEEP.seconds_per_block * len(blocks)
            + SWEEP.seconds_per_colour * len(self._colours)
        )
        self._spread = max(float(np.ptp(costs)) for costs in problem.costs)
        self.prices = Prices(problem)
        self.choice = np.array([costs.argmin() for costs in problem.costs])  # what the last sweep would take
        self.cost = np.inf  # of that choice

    def _add_edges(self, edges: Sequence[ClassedEdge], nodes: np.ndarray, colour_of: np.ndarray) -> None:
        """Puts edges into blocks, and gives their messages places.

        Args:
            nodes: how many nodes each stands for.
        """
        blocks = blocks_of(edges, colour_of, self.settings.blocks)
        for block in blocks:
            for end in (0, 1):
                self._colours[colour_of[block.edges[0].nodes[end]]].blocks[end].append(block)
        at, first, classes_of, entries, per_node = 0, 0, [np.zeros(0, dtype=np.int64)], [], [np.zeros(0)]
        for end in (0, 1):
            for colour in self._colours:
                begin, members = at, [np.zeros(0, dtype=np.int64)]
                lengths = [np.zeros(0, dtype=np.int64)]
                for block in colour.blocks[end]:
                    count, width = block.tables[end].shape[0], len(block.edges)
                    of = [edge.classes[end] for edge in block.edges]
                    sizes, flat = np.array(list(map(len, of))), np.concatenate(of)
                    block.first[end] = first + _starts(sizes)
                    edge = np.repeat(np.arange(width), sizes)
                    option = self._first_option[block.nodes[end]][edge] + _places_within(sizes)
                    slot = flat * width + edge
                    last = np.array([edge.table.shape[end] - 1 for edge in block.edges])[edge]
                    more = np.where(flat == last, count - last, 1)  # in how many classes an option counts
                    filled = np.repeat(slot, more) + width * _places_within(more)
                    members.append(np.repeat(option, more)[np.argsort(filled, kind="stable")] - colour.options.start)
                    lengths.append(np.bincount(filled, minlength=count * width))
                    entries.append((option, at + slot))
                    per_node.append((block.times / nodes[block.nodes[end]])[edge])
                    classes_of.append(flat)
                    first += len(flat)
                    block.slots[end] = slice(at, at + count * width)
                    at += count * width
                colour.slots[end] = slice(begin, at)
                colour.members[end] = np.concatenate(members)
                colour.class_starts[end] = _starts(np.concatenate(lengths))
        self._classes = np.concatenate(classes_of)  # of all options of all edges' ends
        self._messages = np.zeros(at)
        option, slot = np.concatenate([np.zeros((2, 0), dtype=np.int64), *map(np.array, entries)], axis=1)
        order, weights = np.lexsort((slot, option)), np.concatenate(per_node)
        spread = WeightedSums(option[order], slot[order], weights[order], (len(self._place), at))
        share = 1 / np.maximum(self._add_roles(nodes).max(axis=0), 1)
        for colour in self._colours:
            colour.spread = spread.part(colour.options)
            colour.share = share[colour.nodes][colour.owner]

    def _add_roles(self, nodes: np.ndarray) -> np.ndarray:
        """Puts together the messages of edges that share a role.

        Returns:
            Per direction and node, to how many others one of those that it stands for has edges at most.
        """
        degrees = np.zeros((2, len(nodes)))
        for colour in self._colours:
            roles: dict[int, Role] = {}
            for end in (0, 1):
                for block in colour.blocks[end]:
                    times, alone = block.times / nodes[block.nodes[end]], block.roles[end] == ALONE
                    np.add.at(degrees[end], block.nodes[end][alone], times[alone])
                    for place in np.flatnonzero(~alone).tolist():
                        role = roles.setdefault(int(block.roles[end][place]), Role(int(block.nodes[end][place])))
                        role.times += float(times[place])
                        role.ends.add(end)
                        role.slots.append(
                            range(*block.slots[end].indices(len(self._messages)))[place :: len(block.edges)]
                        )
            for role in roles.values():
                degrees[list(role.ends), role.node] += role.times
            shapes: dict[tuple[int, ...], list[np.ndarray]] = defaultdict(list)
            for role in roles.values():
                most = max(map(len, role.slots))
                slots = np.array([[*slots, *[slots[-1]] * (most - len(slots))] for slots in role.slots])
                shapes[slots.shape].append(slots)
            colour.roles = [np.array(alike) for alike in shapes.values()]
        return degrees

    def rounds(self, known: Callable[[], float]) -> Iterator[tuple[tuple[int, ...] | None, float]]:
        """Sweeps forward and backward and sets prices as long as it pays; after each sweep a bound.

        Now and then a choice comes with it that moves may make better; where memory has prices, any that is better.

        Prices follow the slope of the bound, in Polyak's steps, as far as the bound that is aimed at would be on it
        (Nedic and Bertsekas, "Incremental subgradient methods for nondifferentiable optimization", SIAM J. Optim. 2001:
        the aim moves with what comes of it). The slope is that of what is held when options are mixed, since one
        choice says little.

        Args:
            known: the cost of the best choice by now; inf if there is none.
        """
        own, smoothing = self.settings, self.settings.prices.smoothing
        best, before = -np.inf, -np.inf  # the bound, now and at the last look
        messages = self._messages.copy()
        prices, tried, aim, direction = self.prices.values, 0, own.first_aim, None
        priced = bool(prices.any())
        for count in range(1, own.rounds + 1):
            yield None, self.sweep(choose=False)
            bound = self.sweep(forward=False)
            found = self.better(known()) if count == 1 or self.prices.values.any() else None
            if count % own.rounds_per_descent == 0:
                if not self.prices.values.any():
                    self.descend()
                found = tuple(self.choice.tolist())
            yield found, bound
            rise, best = bound - best, max(bound, best)
            scale = max(abs(best), self._spread)
            gap = min(known() - best, aim * scale)
            if rise > 0:
                prices, messages = self.prices.values, self._messages.copy()
            if rise > own.least_rise * gap:
                tried = 0
                if self.prices.values.any() and rise > own.doubling_rise * gap:
                    aim *= 2
            if gap <= 0 or not np.isfinite(bound):  # solved, or nothing fits
                return
            if not priced:
                if count % own.unpriced_rounds:
                    continue
                closed, before = best - before, best
                fits = self._fits()
                if closed > (own.worth if fits else own.worth_before_prices) * min(gap, own.far * abs(best)):
                    continue
                if fits:
                    return
                priced = True
            over = self.prices.over(self._shares(own.prices.temperature * gap / len(self.problem.costs)))
            direction = over if direction is None else smoothing * direction + (1 - smoothing) * over
            slope = np.where((self.prices.values <= 0) & (direction < 0), 0.0, direction)
            tried += 1
            steepness = (slope * slope).sum()  # a product of BLAS depends on threads
            if tried > own.patience or not steepness:  # 0 also where the shares of what is over are next to nothing
                tried, aim, direction = 0, own.aim_factor * gap / scale, None
                self.prices.set(prices)
                self._messages = messages.copy()
                if aim < own.last_aim:
                    break
            else:
                step = own.step * (best + gap - bound) / steepness
                self.prices.set(np.maximum(0.0, self.prices.values + step * slope))
        for forward in (True, False) * own.last_rounds:  # until the messages suit the best prices again
            bound = self.sweep(forward=forward)
            yield self.better(known()), bound

    def better(self, cost: float) -> tuple[int, ...] | None:
        """What the last sweep would take, if that costs less than this and fits."""
        if self.cost < cost and self._fits():
            return tuple(self.choice.tolist())
        return None

    def _fits(self) -> bool:
        """Whether `choice` holds no more than the limit at any pressure point."""
        return not (self.prices.over(self.prices.taken(self.choice)) > 0).any()

    def sweep(self, *, forward: bool = True, choose: bool = True) -> float:
        """Updates all messages in one direction, and `choice` if wanted; the bound that they prove now."""
        return self._sweep(forward, choose, None)

    def least(self, *, forward: bool = True) -> list[np.ndarray]:
        """Node -> option -> what every choice with that option costs at least. Sweeps once."""
        extras = np.zeros(len(self._place))
        bound = self._sweep(forward, False, extras)
        stacked = np.empty(len(extras))
        stacked[self._place] = bound + extras
        return np.split(stacked, np.cumsum([len(costs) for costs in self.problem.costs])[:-1])

    def _sweep(self, forward: bool, choose: bool, extras: np.ndarray | None) -> float:
        ahead, behind = (0, 1) if forward else (1, 0)  # which end a node is of its edges to later ones, to earlier ones
        messages, costs = self._messages, self.prices.costs[self._place]
        taken = messages.copy() if choose else messages
        bound, self.cost = [self._rest, -self.prices.refund], 0.0 if choose else np.inf
        for colour in self._colours if forward else reversed(self._colours):
            if choose:
                self._choose(colour, costs, taken, ahead, behind)
            for slots in colour.roles:
                messages[slots] = messages[slots].min(axis=1, keepdims=True)
            total = costs[colour.options] + colour.spread @ messages
            least = np.minimum.reduceat(total, colour.starts)
            bound.append((least * colour.times).sum())
            total -= least[colour.owner]
            own = colour.slots[ahead]
            spare = np.zeros(len(messages) if extras is not None else 0)
            offered = colour.least(total * colour.share, ahead) - messages[own] if colour.blocks[ahead] else None
            for block in colour.blocks[ahead]:
                within = block.slots[ahead]
                assert offered is not None, "it is for these blocks"
                paid = offered[within.start - own.start : within.stop - own.start].reshape(-1, len(block.edges))
                message = _min_plus(block.tables[ahead], paid)
                least = message.min(axis=0)
                bound.append((least * block.times).sum())
                message -= least
                messages[block.slots[behind]] = message.ravel()
                if extras is not None:
                    # The bound counts `least` of what the edge and this share of the node cost together.
                    left = _min_plus(block.tables[behind], -message) - least
                    spare[within] = left.ravel() - messages[within]
            if extras is not None:
                extras[colour.options] = total + colour.spread @ spare
        return math.fsum(bound)

    def _shares(self, temperature: float) -> np.ndarray:
        """Option -> a probability, which falls with what it costs more than the best of its node by all messages."""
        shares, costs = np.empty(len(self._place)), self.prices.costs[self._place]
        for colour in self._colours:
            total = costs[colour.options] + colour.spread @ self._messages
            weights = np.exp((np.minimum.reduceat(total, colour.starts)[colour.owner] - total) / temperature)
            shares[self._place[colour.options]] = weights / np.add.reduceat(weights, colour.starts)[colour.owner]
        return shares

    def descend(self) -> None:
        """Gives each node the option of `choice` that is cheapest beside its neighbours', some times over."""
        costs, taken = self.prices.costs[self._place], np.zeros(len(self._messages))
        for turn in range(self.settings.descent_passes):
            for colour in self._colours if turn % 2 else reversed(self._colours):
                for ahead, behind in ((0, 1), (1, 0)):
                    self._see(colour, taken, ahead, behind)
                best = _first_least(costs[colour.options] + colour.spread @ taken, colour)
                self.choice[colour.nodes] = best - colour.starts
        self.cost = self._cost()

    def _cost(self) -> float:
        """What `choice` costs without prices."""
        taken, cost = np.zeros(len(self._messages)), 0.0
        for colour in self._colours:
            self._see(colour, taken, 0, 1)
            plain = self.prices.plain[self._place[colour.options]]
            cost += float((plain + colour.spread @ taken)[colour.starts + self.choice[colour.nodes]].sum())
        return cost

    def _see(self, colour: ColourClass, taken: np.ndarray, ahead: int, behind: int) -> None:
        """Puts what the choice of their neighbours costs these nodes into the place of the messages from them."""
        for block in colour.blocks[behind]:
            chosen = self._classes[block.first[ahead] + self.choice[block.nodes[ahead]]]
            taken[block.slots[behind]] = block.paid(behind, chosen).ravel()

    def _choose(self, colour: ColourClass, costs: np.ndarray, taken: np.ndarray, ahead: int, behind: int) -> None:
        """Takes the cheapest options of these nodes, given what those before took.

        Args:
            taken: the messages; in the place of those from nodes that have chosen, what their choice costs.
        """
        self._see(colour, taken, ahead, behind)
        best = _first_least(costs[colour.options] + colour.spread @ taken, colour)
        self.choice[colour.nodes] = best - colour.starts
        taken[colour.slots[ahead]] = 0.0
        plain = self.prices.plain[self._place[colour.options]]
        self.cost += float((plain + colour.spread @ taken)[best].sum())


def _first_least(costs: np.ndarray, colour: ColourClass) -> np.ndarray:
    """Node -> the first of its options that costs least."""
    least = np.minimum.reduceat(costs, colour.starts)
    found = np.flatnonzero(costs == least[colour.owner])[::-1]
    best = np.empty(len(least), dtype=np.int64)
    best[colour.owner[found]] = found
    return best


def _starts(sizes: np.ndarray) -> np.ndarray:
    """Where each of some things begins if they stand one after the other."""
    return np.cumsum(sizes) - sizes


def _places_within(sizes: np.ndarray) -> np.ndarray:
    """0, 1, ... for each of some things of these sizes, one after the other."""
    return np.arange(sizes.sum()) - np.repeat(_starts(sizes), sizes)


def _min_plus(table: np.ndarray, paid: np.ndarray) -> np.ndarray:
    """[class at the other end, edge]: the least over the classes here of what they pay and the edge costs."""
    if table.shape[1] * paid.size <= SWEEP.most_sums:
        return (table + paid[:, None]).min(axis=0)
    result = table[0] + paid[0]
    for own, costs in zip(table[1:], paid[1:], strict=True):
        np.minimum(result, own + costs, out=result)
    return result


def finite(problem: Problem, ceiling: float) -> Problem:
    """The problem in which nothing costs more than `ceiling`, what is forbidden included: its bounds hold for both.

    >>> finite(Problem((np.array([1.0, np.inf]),), (), (), None), 5.0).costs
    (array([1., 5.]),)
    """
    cut: dict[int, np.ndarray] = {}  # many tables are one object

    def below(costs: np.ndarray) -> np.ndarray:
        if id(costs) not in cut:
            cut[id(costs)] = np.minimum(costs, ceiling)
        return cut[id(costs)]

    edges = tuple(Edge(edge.i, edge.j, below(edge.costs)) for edge in problem.edges)
    return replace(problem, costs=tuple(map(below, problem.costs)), edges=edges, checked=True)
