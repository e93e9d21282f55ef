"""Calls that a program has spelled out, recognised as operations with distributed implementations.

`bodies.py` reads a traced step, with `equations.py`. `small_arrays.py` and `probe.py` evaluate parts of it on arrays of
a few elements. `matching.py`, `masks.py` and `products.py` find attention and its gradient; `likeness.py` tells which
are made alike. `rewriting.py`, `editing.py` and `arranging.py` put operations in their place.
"""

from autoshard.recognition.rewriting import recognized, with_operations

__all__ = ["recognized", "with_operations"]
