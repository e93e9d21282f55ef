"""The arguments of a program and another step's plan in, the layouts of those that both steps take out.

Two steps share what stands in both under the same keys, with the same shapes and dtypes: `params` is `state.params` of
a train state. An argument is looked for as a whole, then each part of it. A single array also has to have the same
name, since its shape alone says little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoshard.arrays.subtrees import (
    ArgumentPart,
    Leaf,
    argument_leaves,
    best_of,
    common_suffix_length,
    named_leaves,
    parts_like,
)
from autoshard.errors import ArgumentError, ConflictError
from autoshard.layout import Layout, spec_text
from autoshard.plans.plan import PlacedArray, PlanData
from autoshard.program import Program


def shared_layouts(program: Program, like: PlanData) -> dict[int, Layout]:
    """Argument index -> its layout in the other plan.

    Raises:
        ArgumentError: the steps share nothing; or an array of the other step's state has another type here.
        ConflictError: an argument may be one of several, which lie in different ways.
    """
    search = _SharedArgumentSearch(
        program.name, like.name, argument_leaves(like), like.arguments, frozenset(like.carried)
    )
    found = search.shared(program_leaves(program))
    if not found:
        known = ", ".join(dict.fromkeys(leaf.keys[0] for leaf in search.there))
        raise ArgumentError(
            f"like=: {program.name} shares no argument with {like.name}, whose arguments are {known}.\n"
            "Shared is what has the same keys, shapes and dtypes in both; drop like= if nothing is."
        )
    return {mine: like.arguments[theirs].layout for mine, theirs in found.items()}


def program_leaves(program: Program) -> list[Leaf]:
    """One leaf per array that a caller passes; the first key is the parameter's name."""
    return named_leaves(program.in_tree, [(x.name, x.shape, str(x.dtype)) for x in program.own_arguments])


def shared_arguments(one: Program, other: Program) -> dict[int, int]:
    """Argument of the first program -> the argument of the second that is the same; () if they share nothing.

    Raises:
        ArgumentError, ConflictError: as for `shared_layouts`.
    """
    search = _SharedArgumentSearch(one.name, other.name, program_leaves(other), None, frozenset(other.carried))
    return search.shared(program_leaves(one))


class _SharedArgumentSearch:
    """What to look for shared arguments in."""

    def __init__(
        self,
        here: str,
        other: str,
        there: Sequence[Leaf],
        placed: Sequence[PlacedArray] | None,  # how the other step's arguments lie; None: that is open
        state: frozenset[int],  # of the other step
    ):
        self.here, self.other, self.there, self.placed, self.state = here, other, there, placed, state

    def shared(self, leaves: Sequence[Leaf]) -> dict[int, int]:
        return self.below((), dict(enumerate(leaves)))

    def below(self, prefix: tuple[str, ...], leaves: Mapping[int, Leaf]) -> dict[int, int]:
        """What is shared of these arguments, which all stand below some keys."""
        cut = len(prefix)
        if prefix:
            wanted = [Leaf(leaf.keys[cut:], leaf.shape, leaf.dtype) for leaf in leaves.values()]
            part = self.only(prefix, parts_like(wanted, self.there), is_array=not wanted[0].keys)
            if part is not None:
                return dict(zip(leaves, part.leaves, strict=True))
            if not wanted[0].keys:
                self.check_namesake(next(iter(leaves.values())))
                return {}
        found: dict[int, int] = {}
        for key in dict.fromkeys(leaf.keys[cut] for leaf in leaves.values()):
            inside = {i: leaf for i, leaf in leaves.items() if leaf.keys[cut] == key}
            found |= self.below((*prefix, key), inside)
        return found

    def only(self, prefix: tuple[str, ...], parts: Sequence[ArgumentPart], is_array: bool) -> ArgumentPart | None:
        """The part that arguments below some keys are; None if there is none.

        Raises:
            ConflictError: there are several, which lie in different ways.
        """
        if is_array:
            parts = [part for part in parts if _is_namesake(prefix, part.keys)]
        most = max((common_suffix_length(prefix, part.keys) for part in parts), default=0)
        parts = best_of(
            parts,
            lambda part: common_suffix_length(prefix, part.keys) == most,
            lambda part: part.keys == prefix,
            lambda part: part.is_argument,
            lambda part: part.is_all,
            lambda part: self.state.issuperset(part.leaves),
        )
        for part in parts[1:]:
            self.check_alike("/".join(prefix), parts[0], part)
        return parts[0] if parts else None

    def check_alike(self, name: str, one: ArgumentPart, other: ArgumentPart) -> None:
        for first, second in zip(one.leaves, other.leaves, strict=True):
            lie = [spec_text(self.placed[i].layout) if self.placed else str(i) for i in (first, second)]
            if lie[0] != lie[1]:
                layouts = f", which lie as {lie[0]} and {lie[1]}" if self.placed else ""
                raise ConflictError(
                    f"{name} of {self.here} may be {one.name} or {other.name} of {self.other}{layouts}.\n"
                    f"Call the parameter as it is called there ({one.keys[-1]}), so that its name tells."
                )

    def check_namesake(self, leaf: Leaf) -> None:
        """
        Raises:
            ArgumentError: the other step's state has an array of this name, but of another type.
        """
        for i in self.state:
            other = self.there[i]
            if len(leaf.keys) > 1 and _is_namesake(leaf.keys, other.keys) and not leaf.is_like(other):
                raise ArgumentError(
                    f"{leaf} of {self.here} is {other} of {self.other}: one array cannot be both.\n"
                    "Use the shapes and dtypes of the other step, or other names for what is not shared."
                )


def _is_namesake(some: Sequence[str], others: Sequence[str]) -> bool:
    """Whether one path ends as the other is: ``params/w`` and ``state/params/w``."""
    return common_suffix_length(some, others) == min(len(some), len(others)) > 0
