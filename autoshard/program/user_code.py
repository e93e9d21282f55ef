"""Equations and errors of JAX in, the lines of the user that they come from out."""

from __future__ import annotations

import functools
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import jax

from autoshard.errors import OWN_FOLDER, ArgumentError, MeshError, is_users
from autoshard.jaxprs import JaxprEqn
from autoshard.program.paths import printable

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Source:
    """A line of the user's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        name = printable(_cell(self.file) or self.file.rsplit("/", 1)[-1])
        return f"{name}:{self.line}" if self.line else "unknown line"


def _cell(file: str) -> str | None:
    """What a notebook calls the cell that a file stands for: ``In[3]``; None if it is no cell."""
    if not re.search(r"ipykernel_\d+[/\\]|<ipython-input", file):
        return None
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    named = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(file)
    return named[1] if named else None


def source_of(eqn: JaxprEqn) -> Source | None:
    """The innermost line that the user wrote: not JAX, not the model library, not the standard library."""
    stack = eqn.source_info.traceback
    return None if stack is None else _source_in(stack)


@functools.lru_cache(maxsize=4096)  # layers repeat, and so do the lines that they come from
def _source_in(stack: Any) -> Source | None:
    for frame in stack.frames:
        if is_users(frame.file_name):
            return Source(frame.file_name, frame.line_num, frame.function_name)
    return None


def shows_users_lines(fn: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Makes errors that leave a public function show the user's lines: those of autoshard between them are left out."""

    @functools.wraps(fn)
    def called(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            raise without_own_lines(error)  # noqa: B904  (it is the same error)

    return called


def without_own_lines(error: Exception) -> Exception:
    """The error, with autoshard's lines gone from its traceback and those of its causes.

    As JAX leaves out its own; told to show them (`jax_traceback_filtering="off"`), autoshard shows its lines, too.
    """
    if jax.config.jax_traceback_filtering != "off":  # type: ignore[attr-defined]  # JAX adds its flags later
        for one in _with_causes(error):
            one.__traceback__ = _users_part(one.__traceback__)
    return error


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            waiting += [one.__cause__, one.__context__]
            yield one


def _users_part(lines: TracebackType | None) -> TracebackType | None:
    kept = None
    for line in reversed(_chain(lines)):
        if not line.tb_frame.f_code.co_filename.startswith(OWN_FOLDER):
            kept = TracebackType(kept, line.tb_frame, line.tb_lasti, line.tb_lineno)
    return kept


def _chain(lines: TracebackType | None) -> list[TracebackType]:
    chain = []
    while lines is not None:
        chain.append(lines)
        lines = lines.tb_next
    return chain


_ABOUT_LAYOUTS = re.compile(r"sharding|PartitionSpec|pspec|unreduced|\bmesh\b", re.IGNORECASE)


def named_refusal(fn: Callable, error: Exception) -> MeshError | None:
    """What JAX refuses of a step in explicit mode, in the user's words; None if the error is about something else."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    raised = frames[-1] if frames else None
    is_users_own = raised is not None and re.match(r"raise\b|assert\b", raised.line or "")
    is_jaxs = type(error).__module__.split(".")[0] in ("builtins", "jax") and not is_users_own
    if not is_jaxs or not _ABOUT_LAYOUTS.search(str(error)):
        return None
    line = raised and Source(raised.filename, raised.lineno or 0, raised.name)
    what = str(error).split(" This error occurs at source:")[0].strip()
    if "of type Auto" in what:
        then = "Set a mesh with Explicit axes, as jax.make_mesh makes them (jax.set_mesh), or give autoshard one."
    else:
        then = (
            "Say there how the result lies (out_sharding=, jax.sharding.reshard), or trace the step on Auto axes, "
            "where nothing has to be said: jax.make_mesh(..., axis_types=(AxisType.Auto, ...))."
        )
    name = getattr(fn, "__name__", "the step")
    return MeshError(f"JAX refuses {name} for its shardings at {line or 'unknown line'}: {what}\n{then}")


def named_change_outside(fn: Callable, error: Exception) -> ArgumentError | None:
    """That a step changes an nnx module which it closes over, in the user's words; None if the error is another."""
    if "different trace level" not in str(error):  # flax's words
        return None
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    line = Source(frames[-1].filename, frames[-1].lineno or 0, frames[-1].name) if frames else "unknown line"
    name = getattr(fn, "__name__", "the step")
    return ArgumentError(
        f"{name} changes or differentiates an nnx module at {line} that is no argument of it.\n"
        "Pass the module as an argument, as nnx.jit demands it, too."
    )
