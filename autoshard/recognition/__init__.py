"""Calls that a program has spelled out, recognised as operations with distributed implementations.

`bodies.py` reads a traced step, `small_arrays.py` evaluates parts of it on arrays of a few elements, `matching.py` and
`backward.py` find attention and its gradient, `masks.py` reads what a mask says, and `rewriting.py` puts operations in
their place.
"""

from autoshard.recognition.rewriting import recognized, with_operations

__all__ = ["recognized", "with_operations"]
