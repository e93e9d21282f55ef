"""Tables over layouts and options that layers repeat: functions of their arguments alone, for `Memo.once`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.layout import Layout
from autoshard.model.pricing.resharding_steps import differ
from autoshard.model.strategies import ALL_REDUCE, Strategy


@dataclass(frozen=True)
class ArgumentOption:
    """One option of an argument."""

    home: Layout
    copy: Layout  # what its users see; equal to home: no copy
    narrow: bool = False  # whether only those read the copy who read fewer bits; the others read it at home


def homes_of(options: Sequence[ArgumentOption]) -> tuple[Layout, ...]:
    return tuple(option.home for option in options)


def copies_of(options: Sequence[ArgumentOption]) -> tuple[Layout, ...]:
    return tuple(option.copy for option in options)


def copy_bytes(
    options: Sequence[ArgumentOption], own: np.ndarray, for_all: np.ndarray, for_narrow: np.ndarray
) -> np.ndarray:
    """Bytes of the copy per option; where there is none, of XLA's own."""
    gathered = np.where([option.narrow for option in options], for_narrow, for_all)
    return np.where([option.copy == option.home for option in options], own, gathered)


def from_argument(
    options: Sequence[ArgumentOption],
    wants: Sequence[Layout],
    stays: np.ndarray,
    from_copy: np.ndarray,
    *,
    reads_narrow: bool,
) -> np.ndarray:
    bare = np.array([option.home == option.copy for option in options])[:, None]
    apart = np.array([option.narrow and not reads_narrow for option in options])[:, None]
    at_home = ~differ(homes_of(options), wants)  # others read the copy
    return np.where(at_home, 0.0, np.where(bare & ~stays | apart, np.inf, from_copy))


def any_of(*wants: Sequence[Layout]) -> tuple[Layout, ...]:
    return tuple(dict.fromkeys(itertools.chain(*wants)))


def only_where(allowed: np.ndarray, table: np.ndarray) -> np.ndarray:
    return np.where(allowed, table, np.inf)


def or_unlike(allowed: np.ndarray, makes: Sequence[Layout], wants: Sequence[Layout]) -> np.ndarray:
    """What is allowed, and whatever leads to a layout that no strategy leaves."""
    left = set(makes)
    return allowed | np.array([want not in left for want in wants])


def without_growth(table: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    return np.where(np.less.outer(before, after), np.inf, table)


def narrow_copies(
    makes: Sequence[Layout], wants: Sequence[Sequence[Layout]], reads_narrow: Sequence[bool]
) -> tuple[tuple[Layout, Layout], ...]:
    """How a value is left, as all others can read it, and a copy of that for those who read fewer bits."""
    narrow = itertools.compress(wants, reads_narrow)
    others = [layouts for layouts, fewer in zip(wants, reads_narrow, strict=True) if not fewer]
    copies = any_of(*narrow)
    lefts = [left for left in dict.fromkeys(makes) if all(left in wants for wants in others)]
    return tuple((left, copy) for left in lefts for copy in copies if left != copy)


def and_narrow_copies(wants: tuple[Layout, ...], apart: Sequence[tuple[Layout, Layout]]) -> tuple[Layout, ...]:
    return wants + tuple(copy for _, copy in apart)


def with_narrow_copies(
    table: np.ndarray, narrow: np.ndarray, makes: Sequence[Layout], apart: Sequence[tuple[Layout, Layout]]
) -> np.ndarray:
    """The columns of copies apart from the second table, and only for values that are left as they say."""
    shared = table.shape[1] - len(apart)
    as_left = ~differ(makes, [source for source, _ in apart])
    return np.hstack([table[:, :shared], np.where(as_left, narrow[:, shared:], np.inf)])


def without_narrow_copies(
    table: np.ndarray, wants: Sequence[Layout], apart: Sequence[tuple[Layout, Layout]]
) -> np.ndarray:
    """Beside copies apart, this reader reads the value as it is left."""
    shared = len(table) - len(apart)
    as_left = ~differ([source for source, _ in apart], wants)
    return np.vstack([table[:shared], np.where(as_left, 0.0, np.inf)])


def are_all_reduced(strategies: Sequence[Strategy]) -> np.ndarray:
    return np.array([any(finish.kind == ALL_REDUCE for finish in strategy.finishes) for strategy in strategies])


def are_finished(strategies: Sequence[Strategy]) -> np.ndarray:
    return np.array([bool(strategy.finishes) for strategy in strategies])


def gathers_to(home: Layout, copy: Layout) -> bool:
    """Whether all_gathers alone make the copy. Any other copy holds as much as its home, and had better be the home."""
    return all(whole == split[: len(whole)] for split, whole in zip(home, copy, strict=True))
