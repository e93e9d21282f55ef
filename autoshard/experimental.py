"""What of `jax.experimental` is used: the only file that knows it."""

from __future__ import annotations

from typing import Protocol, cast

from jax.experimental import mesh_utils, multihost_utils, topologies
from jax.experimental.compute_on import compute_on
from jax.experimental.xla_metadata import set_xla_metadata

__all__ = ["KeyValueStore", "compute_on", "key_value_store", "mesh_utils", "set_xla_metadata", "topologies"]


class KeyValueStore(Protocol):
    """The store of texts that the processes of `jax.distributed` share, as JAX's client of it has it.

    Its methods raise `jax.errors.JaxRuntimeError`: NOT_FOUND, DEADLINE_EXCEEDED, or why the store cannot be reached.
    """

    def __hash__(self) -> int: ...

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...

    def key_value_try_get(self, key: str) -> str: ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...


def key_value_store() -> KeyValueStore | None:
    """The store of this process's `jax.distributed`; None if that was not initialized.

    `jax.distributed` does not hand out its client. `multihost_utils`, whose functions are for the same purpose, has it.
    """
    return cast(KeyValueStore | None, multihost_utils.distributed.global_state.client)
