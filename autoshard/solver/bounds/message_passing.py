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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy import sparse

from autoshard.solver.problem import Edge, Problem
from autoshard.solver.symmetry.lifted import ALONE, Lifted, unlifted
from autoshard.solver.tables import classes
from autoshard.solver.verify import ROUNDING

AIM = 0.01  # of the bound: how much higher prices are to raise it at first ...
RAISED = 0.3  # ... what share of that is a reason to aim twice as high ...
SHORTER, SHORTEST = 0.5, 2e-4  # ... factor of the aim when prices do not raise it any more, and the last one
STEP = 0.3  # of the way to the aim, as the slope of the bound points there: how far prices move in a round
SMOOTHING = 0.7  # of the slope that comes from earlier rounds
TEMPERATURE = 0.3  # of the aim per node, at which options are mixed
PATIENCE = 10  # rounds of prices that do not raise the bound, after which they go back and aim lower
LITTLE = 1e-2  # of the gap: a rise that does not count as one
MOST = 1000  # rounds
LAST = 20  # rounds under the best prices
SLACK = 1e-11  # relative; what rounding may make of bytes, and of what they cost and get back
PAUSE = 25  # rounds without prices between two looks at whether they pay ...
WORTH, EARLY = 0.02, 0.1  # ... which they do if they closed this much of the gap; this, where prices would follow
FAR = 0.05  # of the bound: a larger gap says more about the choice in hand, which better messages would make better
DESCENTS = 5  # rounds without prices between two choices, which are improved node by node ...
PASSES = 4  # ... so many times
MANY = 8  # edges with one table, from which on they are dealt with apart and the table is kept once, ...
LARGE = 1 << 14  # ... if its entries for all of them are so many
MUCH = 1000  # entries in a row of tables side by side, from which on rows are taken one by one
PADDED = 4000  # entries: what tables of one shape may be padded by, to stand beside those of another


SECONDS_PER_ENTRY = 2e-9  # of a quiet core, in one sweep, for an entry of a table, ...
SECONDS_PER_MESSAGE = 2e-8  # ... for a message, ...
SECONDS_PER_BLOCK, SECONDS_PER_COLOUR = 4e-5, 6e-5  # ... and for the calls of NumPy


class _Block:
    """Edges between two colours, their tables side by side, so that one operation serves all of them.

    Options with equal costs over an edge are one class. A message is a number per class and edge, [class, edge]. Where
    an edge has fewer classes than others, its last one stands for those that are missing, too.
    """

    def __init__(self, edges: Sequence[_Edge], table: np.ndarray):
        self.edges = edges
        self.times = np.array([edge.times for edge in edges])
        self.roles = tuple(np.array([edge.roles[end] for edge in edges]) for end in (0, 1))
        self.tables = table, np.ascontiguousarray(table.swapaxes(0, 1))  # [class, class at the other end, edge or 1]
        self.nodes = tuple(np.array([edge.nodes[end] for edge in edges]) for end in (0, 1))
        self.slots = [slice(0), slice(0)]  # where its messages to each end stand among all
        self.first = [np.zeros(0, dtype=np.int64)] * 2  # per end and edge: where the classes of its options stand

    def paid(self, end: int, chosen: np.ndarray) -> np.ndarray:
        """What the classes at one end pay, [class, edge], where the edges' other ends chose these classes."""
        table = self.tables[1 - end]
        return table[chosen, :, np.arange(len(chosen)) if table.shape[2] > 1 else 0].T


@dataclass(frozen=True, eq=False)
class _Edge:
    """An edge from a node of a lower colour to one of a higher."""

    nodes: tuple[int, int]
    classes: tuple[np.ndarray, np.ndarray]  # per end: option -> class
    table: np.ndarray  # [class, class]; equal ones are the same object
    times: float  # how many edges it stands for
    roles: tuple[int, int]  # per end: edges of one role have one message; ALONE: a message of its own


@dataclass
class _Role:
    """Edges of a node whose messages to it are one."""

    node: int
    times: float = 0.0  # how many of them one of the nodes that it stands for has
    ends: set[int] = field(default_factory=set)  # which ends of its edges it is
    slots: list[range] = field(default_factory=list)  # edge -> its messages


class _Colour:
    """Nodes without an edge among them: their options stand together, and a sweep deals with all of them at once."""

    def __init__(self, nodes: np.ndarray, times: np.ndarray, sizes: np.ndarray, start: int):
        self.nodes = nodes
        self.times = times[nodes]  # how many nodes each stands for
        self.options = slice(start, start + int(sizes[nodes].sum()))
        self.starts = _starts(sizes[nodes])  # node -> its first option among these
        self.owner = np.repeat(np.arange(len(nodes)), sizes[nodes])  # option -> its node
        self.blocks: tuple[list[_Block], list[_Block]] = [], []  # those in which these nodes are the one or other end
        self.slots = [slice(0), slice(0)]  # the messages to these nodes over them
        self.members = [np.zeros(0, dtype=np.int64)] * 2  # options, class by class in the order of these slots
        self.class_starts = [np.zeros(0, dtype=np.int64)] * 2  # slot -> where its options start among them
        self.roles: list[np.ndarray] = []  # slots of messages that are one, [role, edge, class]; those of one shape
        # [option, slot of all messages]: where it is of the class, how many edges one node has of those it stands for
        self.spread = sparse.csr_array((0, 0))
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

    Every option must have a finite cost, and a finite pair over every edge; `simplify` sees to that. For a `Lifted`
    problem the bounds of `sweep` are those of what it stands for; all else means nothing.
    """

    def __init__(self, problem: Problem | Lifted):
        lifted = problem if isinstance(problem, Lifted) else unlifted(problem)
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
            _Colour(nodes, lifted.node_times, sizes, int(start)) for nodes, start in zip(places, starts, strict=True)
        ]
        self._first_option = np.empty(len(sizes), dtype=np.int64)
        self._first_option[order] = _starts(sizes[order])
        self._add_edges(_edges(lifted, colour_of), lifted.node_times, colour_of)
        blocks = [block for colour in self._colours for block in colour.blocks[0]]
        entries = sum(math.prod(block.tables[0].shape[:2]) * len(block.edges) for block in blocks)
        self.seconds = (  # about what a sweep takes on a quiet core
            SECONDS_PER_ENTRY * entries
            + SECONDS_PER_MESSAGE * len(self._messages)
            + SECONDS_PER_BLOCK * len(blocks)
            + SECONDS_PER_COLOUR * len(self._colours)
        )
        self._spread = max(float(np.ptp(costs)) for costs in problem.costs)
        self.prices = Prices(problem)
        self.choice = np.array([costs.argmin() for costs in problem.costs])  # what the last sweep would take, ...
        self.cost = np.inf  # ... and what that costs

    def _add_edges(self, edges: Sequence[_Edge], nodes: np.ndarray, colour_of: np.ndarray) -> None:
        """Puts edges into blocks, and gives their messages places.

        Args:
            nodes: how many nodes each stands for.
        """
        blocks = _blocks(edges, colour_of)
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
        spread = sparse.csr_array((np.concatenate(per_node), (option, slot)), shape=(len(self._place), at))
        # per direction and node: to how many others one of those that it stands for has edges at most
        degrees = np.zeros((2, len(nodes)))
        for colour in self._colours:
            roles: dict[int, _Role] = {}
            for end in (0, 1):
                for block in colour.blocks[end]:
                    times, alone = block.times / nodes[block.nodes[end]], block.roles[end] == ALONE
                    np.add.at(degrees[end], block.nodes[end][alone], times[alone])
                    for place in np.flatnonzero(~alone).tolist():
                        role = roles.setdefault(int(block.roles[end][place]), _Role(int(block.nodes[end][place])))
                        role.times += float(times[place])
                        role.ends.add(end)
                        role.slots.append(range(*block.slots[end].indices(at))[place :: len(block.edges)])
            for role in roles.values():
                degrees[list(role.ends), role.node] += role.times
            shapes: dict[tuple[int, ...], list[np.ndarray]] = defaultdict(list)
            for role in roles.values():
                most = max(map(len, role.slots))
                slots = np.array([[*slots, *[slots[-1]] * (most - len(slots))] for slots in role.slots])
                shapes[slots.shape].append(slots)
            colour.roles = [np.array(alike) for alike in shapes.values()]
        share = 1 / np.maximum(degrees.max(axis=0), 1)
        for colour in self._colours:
            colour.spread = spread[colour.options]
            colour.share = share[colour.nodes][colour.owner]

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
        best, before = -np.inf, -np.inf  # the bound, now and at the last look
        messages = self._messages.copy()
        prices, tried, aim, direction = self.prices.values, 0, AIM, None
        priced = bool(prices.any())
        for count in range(1, MOST + 1):
            yield None, self.sweep(choose=False)
            bound = self.sweep(forward=False)
            found = self.better(known()) if count == 1 or self.prices.values.any() else None
            if count % DESCENTS == 0:
                if not self.prices.values.any():
                    self.descend()
                found = tuple(self.choice.tolist())
            yield found, bound
            rise, best = bound - best, max(bound, best)
            scale = max(abs(best), self._spread)
            gap = min(known() - best, aim * scale)
            if rise > 0:
                prices, messages = self.prices.values, self._messages.copy()
            if rise > LITTLE * gap:
                tried = 0
                if self.prices.values.any() and rise > RAISED * gap:
                    aim *= 2
            if gap <= 0 or not np.isfinite(bound):  # solved, or nothing fits
                return
            if not priced:
                if count % PAUSE:
                    continue
                closed, before = best - before, best
                fits = self._fits()
                if closed > (WORTH if fits else EARLY) * min(gap, FAR * abs(best)):
                    continue
                if fits:
                    return
                priced = True
            over = self.prices.over(self._shares(TEMPERATURE * gap / len(self.problem.costs)))
            direction = over if direction is None else SMOOTHING * direction + (1 - SMOOTHING) * over
            slope = np.where((self.prices.values <= 0) & (direction < 0), 0.0, direction)
            tried += 1
            if tried > PATIENCE or not slope.any():
                tried, aim, direction = 0, SHORTER * gap / scale, None
                self.prices.set(prices)
                self._messages = messages.copy()
                if aim < SHORTEST:
                    break
            else:
                step = STEP * (best + gap - bound) / (slope * slope).sum()  # a product of BLAS depends on threads
                self.prices.set(np.maximum(0.0, self.prices.values + step * slope))
        for forward in (True, False) * LAST:  # until the messages suit the best prices again
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
        for turn in range(PASSES):
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

    def _see(self, colour: _Colour, taken: np.ndarray, ahead: int, behind: int) -> None:
        """Puts what the choice of their neighbours costs these nodes into the place of the messages from them."""
        for block in colour.blocks[behind]:
            chosen = self._classes[block.first[ahead] + self.choice[block.nodes[ahead]]]
            taken[block.slots[behind]] = block.paid(behind, chosen).ravel()

    def _choose(self, colour: _Colour, costs: np.ndarray, taken: np.ndarray, ahead: int, behind: int) -> None:
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


def _first_least(costs: np.ndarray, colour: _Colour) -> np.ndarray:
    """Node -> the first of its options that costs least."""
    least = np.minimum.reduceat(costs, colour.starts)
    found = np.flatnonzero(costs == least[colour.owner])[::-1]
    best = np.empty(len(least), dtype=np.int64)
    best[colour.owner[found]] = found
    return best


def _firsts(classes: np.ndarray) -> list[int]:
    """The first of each class, of classes numbered in order of appearance."""
    found: dict[int, int] = {}
    for place, number in enumerate(classes.tolist()):
        found.setdefault(number, place)
    return list(found.values())


def _starts(sizes: np.ndarray) -> np.ndarray:
    """Where each of some things begins if they stand one after the other."""
    return np.cumsum(sizes) - sizes


def _places_within(sizes: np.ndarray) -> np.ndarray:
    """0, 1, ... for each of some things of these sizes, one after the other."""
    return np.arange(sizes.sum()) - np.repeat(_starts(sizes), sizes)


def _min_plus(table: np.ndarray, paid: np.ndarray) -> np.ndarray:
    """[class at the other end, edge]: the least over the classes here of what they pay and the edge costs."""
    if table.shape[1] * paid.shape[1] < MUCH:
        return (table + paid[:, None]).min(axis=0)
    result = table[0] + paid[0]
    for own, costs in zip(table[1:], paid[1:], strict=True):
        np.minimum(result, own + costs, out=result)
    return result


def _edges(lifted: Lifted, colour_of: np.ndarray) -> list[_Edge]:
    """The edges with their options in classes."""
    known: dict[tuple[int, bool], tuple] = {}  # tables that are one object, as they are or turned -> classes, small
    equal: dict[tuple, np.ndarray] = {}

    def small(table: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        rows, columns = classes(table), classes(table.T)
        table = np.ascontiguousarray(table[_firsts(rows)][:, _firsts(columns)])
        return (rows, columns), equal.setdefault((table.shape, table.tobytes()), table)

    edges = []
    for edge, times, roles in zip(lifted.problem.edges, lifted.edge_times.tolist(), lifted.roles.tolist(), strict=True):
        turned = bool(colour_of[edge.i] > colour_of[edge.j])
        key = id(edge.costs), turned
        if key not in known:
            known[key] = small(edge.costs.T if turned else edge.costs)
        step = -1 if turned else 1
        (i, j), (role, other) = (edge.i, edge.j)[::step], roles[::step]
        of_ends, table = known[key]
        edges.append(_Edge((i, j), of_ends, table, times, (role, other)))
    return edges


def _blocks(edges: Sequence[_Edge], colour_of: np.ndarray) -> list[_Block]:
    """Edges between the same colours together: those of one table, if they are many, and others of about one shape."""
    same: dict[tuple[int, int, int], list[_Edge]] = defaultdict(list)
    for edge in edges:
        i, j = edge.nodes
        same[int(colour_of[i]), int(colour_of[j]), id(edge.table)].append(edge)
    alike: dict[tuple[int, int], dict[tuple[int, int], list[_Edge]]] = defaultdict(lambda: defaultdict(list))
    blocks = []
    for (i, j, _), found in same.items():
        if len(found) >= MANY and len(found) * found[0].table.size >= LARGE:
            blocks.append(_Block(found, found[0].table[:, :, None]))
        else:
            alike[i, j][found[0].table.shape] += found
    for by_shape in alike.values():
        for (rows, columns), found in _merged(by_shape).items():
            table = np.empty((rows, columns, len(found)))
            for place, edge in enumerate(found):
                own_rows, own_columns = edge.table.shape
                table[:own_rows, :own_columns, place] = edge.table
                table[own_rows:, :own_columns, place] = edge.table[-1]
                table[:, own_columns:, place] = table[:, own_columns - 1, None, place]
            blocks.append(_Block(found, table))
    return blocks


def _merged(by_shape: Mapping[tuple[int, int], list[_Edge]]) -> dict[tuple[int, int], list[_Edge]]:
    """Edges by the shape that their tables are padded to: an operation on few of them takes as long as on many."""
    merged: dict[tuple[int, int], list[_Edge]] = {}
    for shape in sorted(by_shape, key=math.prod, reverse=True):
        edges = by_shape[shape]
        padded = {}  # shape of those before -> the shape that both would have, and how many entries that adds
        for other, found in merged.items():
            both = max(shape[0], other[0]), max(shape[1], other[1])
            entries = math.prod(both) * (len(edges) + len(found))
            padded[other] = entries - math.prod(shape) * len(edges) - math.prod(other) * len(found), both
        nearest = min(padded, key=padded.__getitem__, default=None)
        if nearest is None or padded[nearest][0] > PADDED:
            merged[shape] = edges
        else:
            edges = merged.pop(nearest) + edges
            merged.setdefault(padded[nearest][1], []).extend(edges)
    return merged


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


class Prices:
    """A price per byte at each pressure point, what options cost with them, and what the limit gives back.

    Bytes are counted beyond those of each life's leanest option, so that what is paid and given back is small.
    """

    def __init__(self, problem: Problem):
        points = problem.pressure_points() if problem.limit is not None else np.zeros(0, dtype=np.int64)
        lives = problem.lives if len(points) else ()
        self.plain = np.concatenate(problem.costs)  # all options, without prices
        self._offsets = np.cumsum([0, *(len(costs) for costs in problem.costs)])
        sizes = [len(live.usage) for live in lives]
        options = [self._offsets[live.node] + np.arange(len(live.usage)) for live in lives]
        leanest = np.array([live.usage.min() for live in lives], dtype=np.float64)
        start, end = (np.searchsorted(points, [getattr(live, side) for live in lives]) for side in ("start", "end"))
        held = _over_points(start, end, leanest, len(points))
        self._limit = 0.0 if problem.limit is None else problem.limit * (1 + ROUNDING)
        self._room = self._limit - held
        self._usage = np.concatenate([np.zeros(0), *(live.usage - live.usage.min() for live in lives)])  # all options
        self._option = np.concatenate([np.zeros(0, dtype=np.int64), *options])
        self._start, self._end = np.repeat(start, sizes), np.repeat(end, sizes)
        self.set(np.zeros(len(points)))

    def set(self, values: np.ndarray) -> None:
        """Makes these the prices: cost per byte, 0 or more, of each pressure point."""
        self.values = values
        back = values * self._room
        self.refund = float(back.sum() + SLACK * np.abs(back).sum())
        paid = np.append(0.0, values.cumsum())
        extra = (paid[self._end] - paid[self._start]) * self._usage
        self.costs = self.plain + np.bincount(self._option, extra, minlength=self._offsets[-1])

    def over(self, shares: np.ndarray) -> np.ndarray:
        """Bytes per pressure point by which what is held is over the limit; negative where it is below.

        Args:
            shares: how much of each option is taken; of the options of a node one in all.
        """
        held = _over_points(self._start, self._end, self._usage * shares[self._option], len(self.values))
        over = held - self._room
        over[np.abs(over) <= SLACK * self._limit] = 0.0
        return over

    def taken(self, choice: Sequence[int] | np.ndarray) -> np.ndarray:
        """The shares of a choice: 1 of each option that is chosen."""
        shares = np.zeros(self._offsets[-1])
        shares[self._offsets[:-1] + np.asarray(choice, dtype=np.int64)] = 1.0
        return shares


def _over_points(start: np.ndarray, end: np.ndarray, usage: np.ndarray, points: int) -> np.ndarray:
    """Bytes per point of what is held from start to end."""
    change = np.bincount(start, usage, points + 1) - np.bincount(end, usage, points + 1)
    return change.cumsum()[:-1]
