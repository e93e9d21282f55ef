"""Whether two results are the same numbers: integers exactly, others up to roundings."""

import jax
import jax.numpy as jnp
import numpy as np

# Sums in another order are off by roundings. As large as these a difference in float32 is a fault, unless the program
# makes a small difference large, which whoever compares has to try.
RTOL, ATOL = 1e-4, 1e-5  # the latter times the largest element


def numbers(x):
    """A result as NumPy compares it."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(x))
    small = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return np.asarray(x.astype(jnp.float32) if small else x)


def assert_equal(found, expected):
    """Trees of arrays are of the same types, and equal: integers exactly, others up to roundings."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for i, (one, other) in enumerate(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), f"result {i}"
        inexact = jnp.issubdtype(other.dtype, jnp.inexact)
        rounding = max(1, float(jnp.finfo(other.dtype).eps) / RTOL) if inexact else 0  # a bfloat16 has fewer digits
        one, other = numbers(one), numbers(other)
        if not inexact:
            np.testing.assert_array_equal(one, other, err_msg=f"result {i}")
        else:
            largest = np.max(np.abs(other[np.isfinite(other)]), initial=0)
            np.testing.assert_allclose(
                one, other, rtol=RTOL * rounding, atol=ATOL * rounding * largest, err_msg=f"result {i}"
            )


def are_equal(found, expected):
    try:
        assert_equal(found, expected)
    except AssertionError:
        return False
    return True
