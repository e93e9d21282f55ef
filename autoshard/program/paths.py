"""Key paths of pytrees in, names of arrays out, and which result takes which argument's place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from jax.tree_util import SequenceKey, keystr

from autoshard.program.trees import VALUE_KEYS


def parameter_names(debug_info: Any, paths: Iterable[tuple]) -> list[str]:
    """One slashed path per flat argument: the parameter's name, then the keys below it."""
    names = []
    for path, described in zip(paths, debug_info.arg_names, strict=True):
        # `path` starts with (0, position) for positional and (1, keyword) for keyword arguments; only the debug info
        # knows what a positional parameter is called: "params['w']", or "batch[0]['x']" for one of *batch.
        parameter = re.findall(r"\w+", (described or "").removesuffix(keystr(path[2:]))) or [slashed(path[1:2])]
        names.append("/".join(filter(None, [*parameter, slashed(path[2:])])))
    return names


def slashed(path: tuple) -> str:
    """A key path as one reads it: ``params/0/w``."""
    return printable(_ADDRESS.sub("", keystr(_without_value(path), simple=True, separator="/")))


_ADDRESS = re.compile(
    r" at 0x[0-9a-f]+"
)  # in the text of an object that has none of its own: another one in each process


def printable(text: str, kept: str = "") -> str:
    """A text that a terminal shows as it is: its control characters, and others that nobody sees, are written out.

    >>> printable("layer\x1b[31m"), printable("größer"), printable("a\nb", kept="\n")
    ('layer\\x1b[31m', 'größer', 'a\nb')

    Args:
        kept: characters that stay.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in kept else one.encode("unicode_escape").decode() for one in text)


def _without_value(path: tuple) -> tuple:
    return path[:-1] if path and path[-1] in VALUE_KEYS else path


ArrayKind: TypeAlias = tuple[tuple[int, ...], Any, bool]  # shape, dtype, whether it lies in the host's memory


def carried_results(
    in_paths: Sequence[tuple],
    arguments: Sequence[ArrayKind],
    out_paths: Sequence[tuple],
    results: Sequence[ArrayKind | None],
    donated: frozenset[int],
) -> dict[int, int]:
    """Which result takes which argument's place: kind and path below the top agree, else donated, in order.

    Args:
        in_paths: a key path per flat argument; `out_paths`: one per flat result.
        arguments: what kind of array each argument is.
        results: what kind of array each result is; None for a number, which takes no argument's place.
        donated: the arguments whose memory results may take.
    """

    def below_top(path: tuple) -> tuple[str, ...]:
        return tuple(str(key) for key in path)

    pairs: dict[int, int] = {}
    by_path: dict[tuple, list[int]] = {}
    for i, kind in enumerate(results):
        if kind is None:
            continue
        path = out_paths[i]
        tails = [below_top(path)]
        if path and isinstance(path[0], SequenceKey):
            tails.append(below_top(path[1:]))
        for tail in tails:
            by_path.setdefault((tail, kind), []).append(i)
    taken: set[int] = set()

    def take(argument: int, candidates: list[int]) -> None:
        result = next((i for i in candidates if i not in taken), None)
        if result is not None:
            pairs[argument] = result
            taken.add(result)

    for a, (path, kind) in enumerate(zip(in_paths, arguments, strict=True)):
        if len(path) > 2 or a in donated:  # a bare array argument is state only if the user says so by donating it
            take(a, by_path.get((below_top(path[2:]), kind), []))
    for a in sorted(donated - pairs.keys()):
        take(a, [i for i, kind in enumerate(results) if kind == arguments[a]])
    return pairs
