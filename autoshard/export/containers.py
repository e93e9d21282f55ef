"""A pytree without its leaves in, the Python expression that builds it with other leaves out.

Tuples, lists, dicts and named tuples are written as what they are. A node of any other class is rebuilt from what JAX
knows of it, as `jax.tree.unflatten` would: ``node(train.State, static, {"params": ...})``. Its static data is written
where it is made of literals. What is not, as the functions of an optimizer, is written `ANY`, which equals everything.
So the tree fits that of the step, whatever stands there.
"""

from __future__ import annotations

import collections
import functools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.tree_util import PyTreeDef

from autoshard.program.trees import FlatObject

ANY = "ANY"  # what stands for static data that is no literal
_INDENT = "    "


class UnwritableError(Exception):
    """A container whose class no module names."""


@dataclass(frozen=True)
class Line:
    """One line of an expression."""

    text: str
    comment: str = ""
    depth: int = 0  # of indentation

    def __str__(self) -> str:
        return f"{_INDENT * self.depth}{self.text}{f'  # {self.comment}' if self.comment else ''}"


@dataclass(frozen=True)
class Expression:
    """An expression over several lines, and the modules that it takes names from."""

    lines: tuple[Line, ...]
    modules: frozenset[str] = frozenset()
    nodes: bool = False  # whether it calls `node`

    def text(self, depth: int, prefix: str = "") -> str:
        """The lines, indented, behind a prefix on the first."""
        return "\n".join(str(replace(line, depth=line.depth + depth)) for line in self.prefixed(prefix).lines)

    def prefixed(self, prefix: str, suffix: str = "") -> Expression:
        first, *rest = self.lines
        lines = [replace(first, text=prefix + first.text), *rest]
        lines[-1] = replace(lines[-1], text=lines[-1].text + suffix)
        return replace(self, lines=tuple(lines))


def expression_of(structure: PyTreeDef, leaves: Sequence[Line]) -> Expression:
    """The expression of a pytree.

    Args:
        structure: of the pytree.
        leaves: the expression that stands for each leaf.

    Raises:
        UnwritableError: it has a class that no module names.
    """
    return _expression(structure, iter(leaves))


def _expression(structure: PyTreeDef, leaves: Iterator[Line]) -> Expression:
    data = structure.node_data()
    if data is None:
        return Expression((next(leaves),))
    kind, static = data
    if kind is FlatObject:
        raise UnwritableError("an object that is no tree, as an nnx module")
    children = [_expression(child, leaves) for child in structure.children()]
    if kind is type(None):
        return Expression((Line("None"),))
    if kind is tuple:
        return _around("(", children, ")")
    if kind is list:
        return _around("[", children, "]")
    if kind is dict:
        return _around("{", _keyed(static, children, "{}: "), "}")
    if kind is collections.OrderedDict:
        pairs = [_around("(", [Expression((Line(literal(key)),)), child], ")") for key, child in _zip(static, children)]
        return _importing(_around("collections.OrderedDict([", pairs, "])"), "collections")
    module, name = home_of(kind)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _importing(_around(f"{module}.{name}(", _keyed(kind._fields, children, "{}=", quote=False), ")"), module)
    modules = {module}
    inside = _around("[", children, "]").prefixed(f"node({module}.{name}, {literal(static, modules)}, ", ")")
    return replace(_importing(inside, *modules), nodes=True)


def _zip(keys: Sequence[Any], children: Sequence[Expression]) -> Iterator[tuple[Any, Expression]]:
    return zip(keys, children, strict=True)


def _keyed(keys: Sequence[Any], children: Sequence[Expression], form: str, quote: bool = True) -> list[Expression]:
    return [child.prefixed(form.format(literal(key) if quote else key)) for key, child in _zip(keys, children)]


def _around(start: str, children: Sequence[Expression], end: str) -> Expression:
    if not children:
        return Expression((Line(start + end),))
    inner = [replace(line, depth=line.depth + 1) for child in children for line in child.prefixed("", ",").lines]
    modules = frozenset().union(*(child.modules for child in children))
    return Expression((Line(start), *inner, Line(end)), modules, any(child.nodes for child in children))


def _importing(expression: Expression, *modules: str) -> Expression:
    return replace(expression, modules=expression.modules.union(modules))


def literal(value: Any, modules: set[str] | None = None) -> str:
    """Static data as code.

    Args:
        value: the data.
        modules: those that the code takes names from are added here; None: it takes none.

    >>> literal(("kernel", 8, None, {"a": [1.5]})), literal((print, "w"))
    ('("kernel", 8, None, {"a": [1.5]})', '(ANY, "w")')
    """
    inside = functools.partial(literal, modules=modules)
    if type(value) is str and not {"'", '"'} & set(value):
        return f'"{repr(value)[1:-1]}"'
    if value is None or type(value) in (bool, int, str, bytes):
        return repr(value)
    if type(value) is complex:
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    if type(value) is float:
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    if type(value) is tuple:
        return f"({', '.join(map(inside, value))}{',' * (len(value) == 1)})"
    if type(value) is list:
        return f"[{', '.join(map(inside, value))}]"
    if type(value) is dict:
        return f"{{{', '.join(f'{inside(key)}: {inside(one)}' for key, one in value.items())}}}"
    if isinstance(value, Mapping) and modules is not None:
        return _mapping(value, modules)
    return ANY if modules is None else _sentinel(value, modules)


def _mapping(value: Mapping[Any, Any], modules: set[str]) -> str:
    """A mapping of a class that is made of a dict."""
    try:
        module, name = home_of(type(value))
        same = bool(type(value)(dict(value)) == value)  # type: ignore[call-arg]  # whether it takes one, is the question
    except Exception:  # whatever a constructor of the user's raises
        return ANY
    modules.add(module)
    return f"{module}.{name}({literal(dict(value), modules)})" if same else ANY


def _sentinel(value: Any, modules: set[str]) -> str:
    """An object that stands in the module of its class, as libraries keep what is one of its kind; else `ANY`."""
    module = type(value).__module__
    for name, one in vars(sys.modules.get(module, object)).items():
        if one is value and module not in ("builtins", "__main__"):
            modules.add(module)
            return f"{module}.{name}"
    return ANY


def home_of(kind: type) -> tuple[str, str]:
    """The module and the name by which code reaches a class: the shortest public module that has it.

    >>> home_of(collections.OrderedDict)
    ('collections', 'OrderedDict')

    Raises:
        UnwritableError: no module names it, as a class that a function has made.
    """
    written, name = kind.__module__, kind.__qualname__
    root = written.partition(".")[0]
    modules = [written, *(module for module in list(sys.modules) if module == root or module.startswith(f"{root}."))]
    public = [module for module in modules if not any(part.startswith("_") for part in module.split("."))]
    for module in (*sorted(public, key=lambda module: (len(module), module)), written):
        if _named(module, name) is kind:
            return module, name
    raise UnwritableError(f"{written}.{name}")


def _named(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
