"""A step lowered for flat arrays in, the same with the calling convention of the step out.

`jax.jit(step).lower(...).compile()` is called as the step is, static arguments left out. So is what `.lower` of a
decorated step makes. Whatever else the classes of `jax.stages` know is that of the flat program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

Run = Callable[[Callable[..., Any], tuple, dict[str, Any]], Any]  # of a compiled flat program, with a call's arguments


class CompiledStep(jax.stages.Compiled):
    """A compiled step that is called as the step is."""

    __slots__ = ("_flat", "_run")

    def __init__(self, flat: jax.stages.Compiled, run: Run):
        self._flat, self._run = flat, run

    def __getattribute__(self, name: str) -> Any:
        own = name in ("__class__", "call")
        return object.__getattribute__(self, name) if own else getattr(object.__getattribute__(self, "_flat"), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = object.__getattribute__(self, "_run")
        return run(object.__getattribute__(self, "_flat"), args, kwargs)

    call = __call__


class LoweredStep(jax.stages.Lowered):
    """A lowered step whose compiled form is called as the step is."""

    __slots__ = ("_flat", "_run")

    def __init__(self, flat: jax.stages.Lowered, run: Run):
        self._flat, self._run = flat, run

    def __getattribute__(self, name: str) -> Any:
        own = name in ("__class__", "compile")
        return object.__getattribute__(self, name) if own else getattr(object.__getattribute__(self, "_flat"), name)

    def compile(self, *args: Any, **kwargs: Any) -> CompiledStep:
        """Compiled for the devices of the mesh; takes what `jax.stages.Lowered.compile` takes."""
        flat, run = (object.__getattribute__(self, name) for name in LoweredStep.__slots__)
        return CompiledStep(flat.compile(*args, **kwargs), run)
