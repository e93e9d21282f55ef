"""Arrays with paths in, fewer lines out: arrays that lie alike, under one pattern."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from autoshard.plans.plan import PlacedArray

COLLECTIVE_ROWS = 12  # of a report; all further collectives share one row
_MOST_BRACED_WORDS = 8  # words in braces, at most

Key = tuple[frozenset[str], ...]  # the words that stand at each place of a path


def folded(placed: Sequence[PlacedArray]) -> list[tuple[str, list[PlacedArray]]]:
    """Arrays of one shape, dtype and layout under one name: (pattern, the arrays it stands for), in order.

    Paths are folded place by place, numbers first, as long as a pattern stands for exactly its arrays. All numbers
    that occur at a place are written as ``*``, others in braces.

    >>> paths = [f"blocks/{i}/{name}" for i in range(12) for name in ("q", "k")]
    >>> [(name, len(same)) for name, same in folded([PlacedArray(path, (8,), "float32", ((),), 32) for path in paths])]
    [('blocks/*/{q,k}', 24)]
    """
    alike: dict[tuple, dict[Key, list[int]]] = defaultdict(dict)
    numbers: dict[tuple, set[str]] = defaultdict(set)  # the other words of a path, numbers masked -> what is there
    for index, one in enumerate(placed):
        words = tuple(one.name.split("/"))
        alike[len(words), one.type, one.layout].setdefault(tuple(map(_one, words)), []).append(index)
        for place, word in enumerate(words):
            if word.isdigit():
                numbers[_masked(words), place].add(word)
    lines = [
        (_pattern(key, placed, indices, numbers), indices) for boxes in alike.values() for key, indices in _boxes(boxes)
    ]
    lines.sort(key=lambda line: line[1])
    return [(name, [placed[i] for i in indices]) for name, indices in lines]


def _one(word: str) -> frozenset[str]:
    return frozenset((word,))


def _masked(words: Iterable[str]) -> tuple[str, ...]:
    return tuple("*" if word.isdigit() else word for word in words)


def _boxes(boxes: dict[Key, list[int]]) -> Iterable[tuple[Key, list[int]]]:
    """Unites keys that differ at one place only, again and again."""
    before = None
    while before != len(boxes):
        before = len(boxes)
        for is_number in (True, False):
            for place in range(len(next(iter(boxes)))):
                united: dict[tuple, tuple[Key, list[int]]] = {}
                for key, indices in boxes.items():
                    mixable = all(word.isdigit() == is_number for word in key[place])
                    others = (*key[:place], frozenset() if mixable else key[place], *key[place + 1 :])
                    old, found = united.get(others, (key, []))
                    united[others] = (*key[:place], key[place] | old[place], *key[place + 1 :]), found + indices
                boxes = dict(united.values())
    return ((key, sorted(indices)) for key, indices in boxes.items())


def _pattern(key: Key, placed: Sequence[PlacedArray], indices: list[int], numbers) -> str:
    paths = [placed[i].name.split("/") for i in indices]
    words = []
    for place, choices in enumerate(key):
        in_order = list(dict.fromkeys(path[place] for path in paths))
        there = set().union(*(numbers.get((_masked(path), place), ()) for path in paths))
        if len(choices) == 1:
            words.append(in_order[0])
        else:
            words.append("*" if choices == there else "{" + ",".join(_shortened(_ranges(in_order))) + "}")
    return "/".join(words)


def _shortened(words: list[str]) -> list[str]:
    """A list that a line can hold.

    >>> _shortened(["q", "k", "v"]), _shortened([f"layer{i}" for i in range(40)])
    (['q', 'k', 'v'], ['layer0', 'layer1', 'layer2', '... 37 more'])
    """
    return words if len(words) <= _MOST_BRACED_WORDS else [*words[:3], f"... {len(words) - 3} more"]


def _ranges(words: list[str]) -> list[str]:
    """Runs of numbers as ``0-3``.

    >>> _ranges(["0", "1", "2", "5"])
    ['0-2', '5']
    """
    if not all(word.isdigit() for word in words):
        return words
    runs: list[list[int]] = []
    for number in sorted(map(int, words)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(first) if first == last else f"{first}-{last}" for first, last in runs]
