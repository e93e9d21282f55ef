"""A step and the arguments of a call in; the step from flat arrays to flat results, and the way back, out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from autoshard.arrays.arguments import abstract, type_of
from autoshard.jaxprs import ClosedJaxpr
from autoshard.program.flattening import FlatCall, flat_results, flattened
from autoshard.program.signature import Arguments, ArgumentSelection, join
from autoshard.program.trees import Tree

if TYPE_CHECKING:
    from autoshard.program.modules import ModuleChanges


class FlatStep:
    """A step whose jaxpr is rewritten: its flat arguments and results are those of the jaxpr.

    Of nnx modules, the arrays are arguments, and what the step changes in them are results.
    """

    def __init__(
        self, fn: Callable[..., Any], selection: ArgumentSelection, static: tuple[Any, ...], dynamic: Arguments
    ) -> None:
        """
        Args:
            selection: which arguments are static.
            static: those of the call.
            dynamic: the others; arrays are only looked at for shape and dtype.
        """
        self._fn, self._selection, self._static, self._dynamic = fn, selection, static, dynamic
        self._call: FlatCall = flattened(dynamic)
        self._result: Tree | ModuleChanges | None = None  # what the results of the last trace are made into

    def traced(self, arrays: Sequence[Any] | None = None) -> ClosedJaxpr:
        """The jaxpr for arrays of these shapes and dtypes; None: those of the call."""
        given = self._call.arrays if arrays is None else arrays
        return jax.make_jaxpr(self._flat)(*(abstract(type_of(array)) for array in given))

    def _flat(self, *arrays: Any) -> list[Any]:
        modules = self._call.modules
        if modules is None:
            positional, keyword = join(self._static, Tree.of(self._dynamic).unflattened(list(arrays)))
            made = self._fn(*positional, **keyword)
            results, self._result = flat_results(made, (positional, keyword), arrays)
            return list(results)
        inside = modules.traced(arrays)
        positional, keyword = join(self._static, inside.arguments)
        results, self._result = inside.returned(self._fn(*positional, **keyword))
        return list(results)

    def running(self, run: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
        """The step with `run`, from flat arrays to the flat results of the last trace, in the place of its jaxpr."""
        result = self._result
        assert result is not None, "`traced` comes first"

        @functools.wraps(self._fn)
        def step(*args: Any, **kwargs: Any) -> Any:
            call = flattened(self._selection.split(args, kwargs)[1])
            results = run(*call.arrays)
            if isinstance(result, Tree):
                return result.unflattened(results)
            return call.result_of(result, call.arrays, results)

        return step


def is_traced_for(closed: ClosedJaxpr, arrays: Sequence[Any]) -> bool:
    """Whether a jaxpr is that of arrays of these shapes; those of a microbatch have fewer rows than those of a call."""
    return [jax.typeof(array).shape for array in arrays] == [aval.shape for aval in closed.in_avals]


def with_arrays(static: tuple[Any, ...], dynamic: Arguments, call: FlatCall, arrays: Sequence[Any]) -> Arguments:
    """The arguments of a call with other arrays outside of modules; modules stay those of the caller.

    Args:
        call: the dynamic arguments, taken apart.
    """
    other = Tree.of(dynamic).unflattened(list(arrays)) if call.modules is None else call.modules.beside(arrays)
    return join(static, other)
