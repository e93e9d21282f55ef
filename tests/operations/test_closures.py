"""Digests of what functions close over."""

from dataclasses import dataclass, field
from time import process_time

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.operations.closures import closure_digest


def digest(value):
    return closure_digest([lambda: value])


@dataclass
class Unset:
    size: int = field(init=False)


def test_arrays_without_numbers_count_by_their_kind():
    gone, other = jnp.ones(3), jnp.zeros(3)
    gone.delete()
    other.delete()
    assert digest(gone) == digest(other) != digest(jnp.ones(3))
    assert digest(jax.random.key(0)) == digest(jax.random.key(1)) != digest(jax.random.split(jax.random.key(0)))


def test_objects_in_arrays_are_not_told_by_where_they_lie():
    assert digest(np.array([object()], object)) == digest(np.array([object()], object))


def test_a_field_without_a_value_is_one():
    assert digest(Unset()) == digest(Unset()) != ""


def composed(number, times):
    def f(x):
        return number * x

    for _ in range(times):
        f = (lambda first, second: lambda x: second(first(x)))(f, f)
    return f


def test_what_is_shared_is_read_once():
    start = process_time()
    first, same, other = (closure_digest([composed(number, 100)]) for number in (1, 1, 2))
    assert first == same != other
    assert process_time() - start < 5


def test_what_holds_itself_is_read_to_its_end():
    ones, twos = [1], [2]
    ones.append(ones)
    twos.append(twos)
    assert digest(ones) != digest(twos)
