"""Key paths of pytrees in, names of arrays out, and which result takes which argument's place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jax.tree_util import SequenceKey, keystr

from autoshard.program.trees import is_value_key


def parameter_names(debug_info: Any, paths: Iterable[tuple]) -> list[str]:
    """One slashed path per flat argument: the parameter's name, then the keys below it."""
    names = []
    for path, described in zip(paths, debug_info.arg_names, strict=True):
        # `path` starts with (0, position) for positional and (1, keyword) for keyword arguments; only the debug info
        # knows what a positional parameter is called: "params['w']", or "batch[0]['x']" for one of *batch.
        below = _FLAT_INDEX.sub(r"\1", keystr(path[2:]))
        parameter = re.findall(r"\w+", (described or "").removesuffix(below)) or [slashed(path[1:2])]
        names.append("/".join(filter(None, [*parameter, slashed(path[2:])])))
    return names


_FLAT_INDEX = re.compile(r"<flat index ([^>]+)>")  # the key of a container without keys; debug info shortens it to \1


def slashed(path: tuple) -> str:
    """A key path as one reads it: ``params/0/w``."""
    return printable(_ADDRESS.sub("", keystr(_without_value(path), simple=True, separator="/")))


_ADDRESS = re.compile(
    r" at 0x[0-9a-f]+"
)  # in the text of an object that has none of its own: another one in each process


def printable(text: str, kept: str = "") -> str:
    r"""A text that a terminal shows as it is: its control characters, and others that nobody sees, are written out.

    >>> printable("layer\x1b[31m"), printable("größer"), printable("a\nb", kept="\n")
    ('layer\\x1b[31m', 'größer', 'a\nb')

    Args:
        kept: characters that stay.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in kept else one.encode("unicode_escape").decode() for one in text)


def _without_value(path: tuple) -> tuple:
    return path[:-1] if path and is_value_key(path[-1]) else path


ArrayKind: TypeAlias = tuple[tuple[int, ...], Any, bool]  # shape, dtype, whether it lies in the host's memory


@dataclass(frozen=True)
class Places:
    """Where flat arguments and results stand, and what is known of which takes the place of which."""

    arguments: Sequence[tuple]  # a key path per flat argument
    results: Sequence[tuple]  # a key path per flat result
    donated: frozenset[int]  # arguments whose memory results may take
    in_place: Mapping[int, int] = field(default_factory=dict)  # argument in a module -> result that replaces it there


def carried_results(
    places: Places, arguments: Sequence[ArrayKind], results: Sequence[ArrayKind | None]
) -> dict[int, int]:
    """Which result takes which argument's place: kind and path below the top agree, else donated, in order.

    Args:
        arguments: what kind of array each argument is.
        results: what kind of array each result is; None for a number, which takes no argument's place.
    """

    def below_top(path: tuple) -> tuple[str, ...]:
        return tuple(str(key) for key in path)

    pairs = {a: i for a, i in places.in_place.items() if arguments[a] == results[i]}
    taken = set(places.in_place.values())
    by_path: dict[tuple, list[int]] = {}
    for i, kind in enumerate(results):
        if kind is None:
            continue
        path = places.results[i]
        tails = [below_top(path)]
        if path and isinstance(path[0], SequenceKey):
            tails.append(below_top(path[1:]))
        for tail in tails:
            by_path.setdefault((tail, kind), []).append(i)

    def take(argument: int, candidates: list[int]) -> None:
        result = next((i for i in candidates if i not in taken), None)
        if result is not None:
            pairs[argument] = result
            taken.add(result)

    for a, (path, kind) in enumerate(zip(places.arguments, arguments, strict=True)):
        if a in pairs or not (len(path) > 2 or a in places.donated):
            continue  # a bare array argument is state only if the user says so by donating it
        take(a, by_path.get((below_top(path[2:]), kind), []))
    for a in sorted(places.donated - pairs.keys()):
        take(a, [i for i, kind in enumerate(results) if kind == arguments[a]])
    return pairs
