"""Calls that a program has spelled out, recognised as operations with distributed implementations.

`bodies.py` reads a traced step, with `equations.py`. `small_arrays.py` and `probe.py` evaluate parts of it on arrays of
a few elements. `attention_weights.py`, `masks.py` and `products.py` find attention and its gradient;
`structural_equality.py` tells which values are computed alike. `rewriting.py`, `editing.py` and `dim_order.py` put
operations in their place.
"""

from autoshard.recognition.rewriting import recognized, with_operations

__all__ = ["recognized", "with_operations"]
