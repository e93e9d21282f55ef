"""Narrow parts of a problem, solved by elimination; where memory binds, by prices and labels: a row of the table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.solver.bounds.message_passing import Relaxation
from autoshard.solver.bounds.prices import Prices
from autoshard.solver.bounds.settings import RELAXATION, RelaxationSettings
from autoshard.solver.exact.elimination import NarrowWay, narrow_way
from autoshard.solver.exact.elimination_order import MOST_ENTRIES, ORDERS
from autoshard.solver.exact.labels import LabelSearch
from autoshard.solver.incumbent import Incumbent
from autoshard.solver.local_search.forest_moves import ForestState, move_seconds
from autoshard.solver.run import NoChoice, ProblemPart, SolverRun
from autoshard.solver.verify import verify


@dataclass(frozen=True)
class Elimination:
    """Bucket elimination of narrow parts, memory aside: an algorithm of the table.

    Where the cheapest choice does not fit, its cost is still a bound, and elimination at prices of memory gives choices
    that do. Labels then close what prices leave open.
    """

    most_entries: int = MOST_ENTRIES  # of all tables together
    most_options: int = 20_000  # of a part; in larger ones, an order of elimination takes longer to find
    priced_turns: int = 20  # of elimination at prices of memory
    priced_seconds: float = 0.03  # of a quiet core, that each of these may take
    labelled_seconds: float = 1.0  # of a quiet core, that elimination may take for labels to follow
    labelled_cells: int = 20_000  # nodes times pressure points, up to which labels are few enough to close a gap
    price_share: float = 0.1  # of the time left, for the prices under which labels are built
    label_share: float = 0.25  # of the time left, for labels
    most_work: float = 1.0  # s of a quiet core, for prices and for labels, where iterations are counted
    most_labels: tuple[int, ...] = (500, 2000, 8000, 32_000)  # that are kept, in turn
    least_progress: float = 0.1  # of the gap: what each of these has to close for the next one to be worth its time
    relaxation: RelaxationSettings = RELAXATION

    def applies(self, part: ProblemPart, run: SolverRun) -> bool:
        return not run.is_large(part.problem) and part.options <= self.most_options

    def improve(self, part: ProblemPart, run: SolverRun) -> bool:
        incumbent, most = part.incumbent, float(self.most_entries)
        if run.clock.iterations is None:
            most = min(most, run.clock.left() / ORDERS.seconds_per_entry)
        found = narrow_way(part.problem, int(most))
        run.clock.spend(ORDERS.seconds_per_node * len(part.problem.costs))
        if found is None:
            return False
        with run.report.during("elimination"):
            choice = found.cheapest(part.problem)
            run.clock.budget.spend(found.order.seconds)
        if choice is None:
            raise NoChoice
        incumbent.offer(choice)
        incumbent.prove(verify(part.problem, choice)[0])
        if not incumbent.is_solved and found.order.seconds < self.priced_seconds:
            self._improve_priced(incumbent, found, run)
        if incumbent.is_solved or not self._pays_labels(incumbent, found):
            return incumbent.is_solved
        with run.report.during("labels"):
            self._improve_with_labels(incumbent, found, run)
        return incumbent.is_solved or (incumbent.is_close and not run.clock.is_rejected)

    def _improve_priced(self, incumbent: Incumbent, way: NarrowWay, run: SolverRun) -> None:
        """Offers the cheapest choices at prices of memory that rise until one fits, and fall again."""
        problem = incumbent.problem
        moves = ForestState(problem, np.random.default_rng(run.seed))
        prices = Prices(problem)
        with run.report.during("elimination"):
            for _ in range(self.priced_turns):
                prices.set(moves.prices)
                choice = way.cheapest(prices.priced(problem))
                assert choice is not None, "prices forbid nothing"
                run.clock.spend(way.order.seconds + move_seconds(problem))
                moves.choice = np.array(choice)
                if moves.adjust_prices():
                    moves.descend()
                    incumbent.offer(moves.choice.tolist())

    def _pays_labels(self, incumbent: Incumbent, way: NarrowWay) -> bool:
        """Whether a known choice says what labels may cost, and they are not too many."""
        problem = incumbent.problem
        if problem.limit is None or not problem.lives or incumbent.choice is None:
            return False
        cells = len(problem.costs) * len(problem.pressure_points())
        return cells <= self.labelled_cells and way.order.seconds <= self.labelled_seconds

    def _improve_with_labels(self, incumbent: Incumbent, way: NarrowWay, run: SolverRun) -> None:
        """Raises the bound by prices, and then closes the gap by more and more labels."""
        problem = incumbent.problem
        values = self._prices(incumbent, run)
        if not values.any():
            return
        run.memory_binds = True
        with run.clock.hurry(self.label_share, self.most_work):
            search = LabelSearch(way.problem(problem), way.order, values)
            run.clock.spend(way.order.seconds)
            for most in sorted({min(most, search.most) for most in self.most_labels}):
                gap, wanted = incumbent.cost - incumbent.bound, incumbent.target
                found = search.run(wanted=wanted, most=most, spend=run.clock.spend)
                if found.choice is not None:
                    incumbent.offer(found.choice[: len(problem.costs)])
                incumbent.prove(min(found.bound, wanted))
                if incumbent.is_solved or incumbent.cost - incumbent.bound > (1 - self.least_progress) * gap:
                    return

    def _prices(self, incumbent: Incumbent, run: SolverRun) -> np.ndarray:
        """The best prices of memory found: cost per byte of each pressure point."""
        with run.clock.hurry(self.price_share, self.most_work):
            relaxation = Relaxation(incumbent.problem, self.relaxation)
            for choice, bound in relaxation.rounds(lambda: incumbent.cost):
                run.clock.spend(relaxation.seconds)
                if choice is not None:
                    incumbent.offer(choice)
                incumbent.prove(bound)
        return relaxation.prices.values
