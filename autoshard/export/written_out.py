"""A step written out as data: what `standalone.py` runs in the place of the jaxpr that JAX makes of the step.

`Plan.to_code` writes this file behind such a step. It stands alone beside that file. Its classes look like those of
JAX's jaxprs. Variables are numbers, each body's its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.export.standalone import evaluated


class Number(NamedTuple):
    """A literal among the operands."""

    val: Any


def number(kind: str, value: Any) -> Number:
    """A scalar of a dtype.

    >>> number("float32", 2.0).val.dtype
    dtype('float32')
    """
    return Number(np.asarray(value, jnp.dtype(kind)))


def array(kind: str, shape: Sequence[int], data: str) -> np.ndarray:
    """A constant of a dtype and shape, from its bytes in hexadecimal digits."""
    return np.frombuffer(bytes.fromhex(data), jnp.dtype(kind)).reshape(shape)


def keys(seeds: Any, impl: str) -> Any:
    """A key of each seed."""
    made = functools.partial(jax.random.key, impl=impl)
    for _ in range(jnp.ndim(seeds)):
        made = jax.vmap(made)
    return made(seeds)


def on_shards(*arrays: Any, body: Any, **how: Any) -> Any:
    """The results of a body that each device runs on its shards along some axes of the mesh that is set."""
    how["out_specs"] = list(how["out_specs"])
    return jax.shard_map(functools.partial(evaluated, body=body), check_vma=False, **how)(*arrays)


# Primitive: its function, where that is not the one in `jax.lax` of its name.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "device_put": lambda *arrays: arrays,
    "operation": evaluated,
    "psum_invariant": lambda array, axes, **how: jax.lax.psum(array, axes, **how),
    "pvary": lambda array, **_: array,
    "random_clone": jax.random.clone,
    "random_seed": keys,
    "random_unwrap": jax.random.key_data,
    "random_wrap": jax.random.wrap_key_data,
    "reduce_scatter": lambda array, axis_size, axis_name, **how: jax.lax.psum_scatter(array, axis_name, **how),
    "shard_map": on_shards,
}


class Function(NamedTuple):
    """A public function of JAX in the place of a primitive whose parameters are functions or objects."""

    name: str

    @property
    def multiple_results(self) -> bool:
        return self.name in ("device_put", "operation", "shard_map")

    def get_bind_params(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        return params

    def bind(self, *arrays: Any, **params: Any) -> Any:
        made = FUNCTIONS.get(self.name) or getattr(jax.lax, self.name.replace("-", "_"))
        return made(*arrays, **params)


class Operation(NamedTuple):
    """One equation."""

    primitive: Any  # of JAX, or a `Function`
    invars: Sequence[int | Number]
    outvars: Sequence[int]
    params: Mapping[str, Any] = {}
    threefry_partitionable: bool = True

    @property
    def ctx(self) -> Operation:
        """What is said around it."""
        return self


class Body(NamedTuple):
    """One jaxpr, and the arrays that it closes over."""

    invars: Sequence[int]
    eqns: Sequence[Operation]
    outvars: Sequence[int | Number]
    constants: Mapping[int, np.ndarray] = {}
    types: Sequence[str] = ()  # of the inputs, as "float32[8, 16]"; of the step alone

    @property
    def jaxpr(self) -> Body:
        return self

    @property
    def constvars(self) -> Sequence[int]:
        return list(self.constants)

    @property
    def consts(self) -> Sequence[np.ndarray]:
        return list(self.constants.values())
