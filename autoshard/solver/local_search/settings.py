"""The numbers of moves and of the compiled searches, apart from compiled code, which takes seconds to load."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MoveSettings:
    """Prices of memory under moves while no choice fits, in the NumPy version and the compiled one; and their work."""

    price_rise: float = 1.5  # factor of prices where memory is over the limit
    first_price: float = 0.1  # added to prices there, in what a byte may cost on average
    price_fall: float = 0.8  # factor where all fits; compiled moves have a slower one, as they go on for longer
    # Seconds of a quiet core, of one move of the NumPy version: per node, edge and life.
    seconds_per_node: float = 1.5e-5
    seconds_per_edge: float = 5e-6
    seconds_per_life: float = 5e-6


@dataclass(frozen=True)
class BlockSearchSettings:
    """Block moves, and the prices of memory that they go under."""

    table_entries: float = 1e4  # of a table in a block move, at most
    plans: int = 24  # of block moves, per search
    repaired_nodes: int = 100  # that change to make a choice fit, at most
    # Prices that follow the choice, once one is known.
    price_rise: float = 1.03  # factor where memory is over the limit
    price_fall: float = 0.97  # factor where all fits
    added_share: float = 0.02  # of all prices together: what is spread over what is over the limit
    # Moves in a row.
    following_moves: int = 10  # under prices that follow the choice
    rising_moves: int = 12  # under prices that rise, before prices follow the choice
    lowest_price: float = 0.1  # share of the best prices: rising ones start between this and all of them
    # Local moves free a random share of all nodes near the best choice, under a random share of the best prices.
    local_moves: int = 40
    smallest_share: float = 0.02
    largest_share: float = 0.5
    lowest_local_price: float = 0.3
    highest_local_price: float = 1.1


@dataclass(frozen=True)
class RoundSettings:
    """Rounds of an ascent and of searches side by side."""

    entries: float = 3e7  # that each search looks at in a round: under half a second
    long_entries: float = 2e8  # the same in a round beside an integer program
    counted_searches: int = 3  # where their number may not depend on that of threads
    seconds: float = 1.6  # of a quiet core, of all `counted_searches` and the ascent, in a round of `entries`


@dataclass(frozen=True)
class NeighbourhoodSettings:
    """Neighbourhoods for the integer program. How many nodes are free follows how long that takes."""

    first_nodes: int = 500  # that are free in the first one
    least_nodes: int = 20  # that are free, however long the program takes
    growth: float = 1.3  # factor of the number of free nodes, when the neighbourhood was solved in time
    shrinkage: float = 0.6  # factor of that number, when it was not
    seconds: float = 6.0  # of the integer program, for one neighbourhood
    looks: int = 15  # of HiGHS at whether to stop, for one neighbourhood, where iterations are counted


MOVES = MoveSettings()
BLOCK_SEARCH = BlockSearchSettings()
ROUNDS = RoundSettings()
NEIGHBOURHOODS = NeighbourhoodSettings()
