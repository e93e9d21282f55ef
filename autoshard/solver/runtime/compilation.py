"""How functions are compiled: once, kept on disk, and without Python's lock while they run."""

from typing import Any

from numba import njit


def kernel(**options: Any):
    """Compiles a function that Python calls."""
    return njit(cache=True, nogil=True, **options)


def inner(**options: Any):
    """Compiles a function that other compiled ones call: the way in from Python takes long to compile."""
    return kernel(no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)


@inner()
def sort(values):
    """Sorts a short array in place (Shell's way; NumPy's takes a second to compile)."""
    gap = len(values) // 2
    while gap > 0:
        for k in range(gap, len(values)):
            value, at = values[k], k
            while at >= gap and values[at - gap] > value:
                values[at] = values[at - gap]
                at -= gap
            values[at] = value
        gap //= 2
