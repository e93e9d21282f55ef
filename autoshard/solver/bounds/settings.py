"""The numbers of message passing. The NumPy version and the compiled one share what they have in common."""

from __future__ import annotations

from dataclasses import dataclass

STEP_ENTRIES = 5e4  # of tables, as compiled code counts its work: what the calls of one step take


@dataclass(frozen=True)
class PriceSettings:
    """How prices on memory follow the slope of the bound, in both versions."""

    smoothing: float = 0.7  # share of the slope that comes from earlier steps
    temperature: float = 0.3  # of the gap that is aimed at, per node: at which options are mixed


@dataclass(frozen=True)
class BlockSettings:
    """Which edges stand side by side in the NumPy version, so that one operation serves all of them."""

    # So many edges with one table, of so many entries in all, are a block of their own that keeps the table once.
    same_table_edges: int = 8
    same_table_entries: int = 1 << 14
    padded_entries: int = 4000  # by which tables of one shape may be padded, to stand beside those of another


@dataclass(frozen=True)
class SweepSettings:
    """How a sweep of the NumPy version works, and its seconds of a quiet core."""

    most_sums: int = 1 << 20  # entries of tables side by side: in larger ones, rows are added up one by one
    seconds_per_entry: float = 2e-9  # of a table
    seconds_per_message: float = 2e-8  # one number that an edge hands on
    seconds_per_block: float = 4e-5  # of the calls of NumPy
    seconds_per_colour: float = 6e-5  # of the same


@dataclass(frozen=True)
class RelaxationSettings:
    """When `Relaxation.rounds` sets prices, how far they move, and when it ends. A round is two sweeps."""

    prices: PriceSettings = PriceSettings()
    blocks: BlockSettings = BlockSettings()
    rounds: int = 1000  # at most
    last_rounds: int = 20  # under the best prices, until the messages suit them
    # Prices.
    # The aim is the rise of the bound that a step of prices goes for, as a share of the bound.
    first_aim: float = 0.01
    doubling_rise: float = 0.3  # share of the aim: a step that raises the bound by more doubles the aim
    aim_factor: float = 0.5  # of the aim: the next one, when prices no longer raise the bound
    last_aim: float = 2e-4  # the smallest aim
    step: float = 0.3  # of the way to the aim, as the slope of the bound points there: how far prices move in a round
    patience: int = 10  # rounds of prices that do not raise the bound, after which they go back and aim lower
    least_rise: float = 1e-2  # of the gap: less does not count as a rise
    # When prices begin.
    unpriced_rounds: int = 25  # between two looks at whether rounds without prices pay
    worth: float = 0.02  # share of the gap that these rounds must close to go on
    worth_before_prices: float = 0.1  # the same share where prices would follow
    # Of the bound: a larger gap says more about the incumbent, which better messages would make better.
    far: float = 0.05
    # Choices.
    rounds_per_descent: int = 5  # without prices: after so many, a choice is made and improved node by node
    descent_passes: int = 4  # over all nodes, to improve one choice


SWEEP = SweepSettings()
RELAXATION = RelaxationSettings()


@dataclass(frozen=True)
class AscentSettings:
    """How far the compiled ascent steps. Its aim moves by what a step gains, so that it needs no schedule."""

    prices: PriceSettings = PriceSettings()
    unpriced_sweeps: int = 30  # pairs, before memory gets its first price
    step: float = 0.5  # length of Polyak's steps
    first_aim: float = 0.05  # of the bound: how far the first steps aim above the best one
    farther: float = 1.5  # factor of the aim after a large gain
    large_gain: float = 0.12  # share of the aim: a step that gains more has a large gain
    nearer: float = 0.7  # factor of the aim after `patience` steps that gain nothing
    patience: int = 3  # steps without a gain, until the aim comes nearer
    settled_aim: float = 2e-4  # of the bound: with a smaller aim it will hardly rise further
    finest_aim: float = 1e-6  # of the first aim: the same
    second_aim: float = 0.003  # of the bound: how far shorter steps aim, once it has settled under bold ones
    new_price: float = 0.02  # of the largest price: how fast prices of points that have none yet rise, beside it
    sweep_entries: float = 2.0  # of a block move, for an entry of a table in a pair of sweeps


ASCENT = AscentSettings()
