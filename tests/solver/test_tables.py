"""Tables taken apart add up again."""

import numpy as np

from autoshard.solver.tables import classes, min_plus, split


def test_split_adds_up():
    rng = np.random.default_rng(0)
    for _ in range(200):
        shape = rng.integers(1, 6, 2)
        forbidden = rng.random(shape) < rng.choice([0, 0.3])
        table = np.where(forbidden, np.inf, rng.random(shape) * 10.0 ** rng.integers(-9, 9))
        rows, columns, rest = split(table)
        largest = np.abs(table[np.isfinite(table)]).max(initial=0)
        np.testing.assert_allclose(rows[:, None] + columns + rest, table, rtol=0, atol=1e-11 * largest)
        alive = np.isfinite(table)
        assert (rest[alive.any(axis=1)].min(axis=1, initial=np.inf) == 0).all()
        assert (rest[:, alive.any(axis=0)].min(axis=0, initial=np.inf) == 0).all()


def test_separable_table_has_no_rest():
    rng = np.random.default_rng(0)
    _, _, rest = split(np.add.outer(rng.random(20), rng.random(30)) * 1e-6)
    assert not rest.any()


def test_classes():
    assert classes(np.array([[np.inf, 1], [0, 1], [np.inf, 1], [0, 2]])).tolist() == [0, 1, 0, 2]


def test_min_plus():
    rng = np.random.default_rng(0)
    left, right = rng.random((3, 4)), rng.random((4, 5))
    np.testing.assert_array_equal(min_plus(left, right), (left[:, :, None] + right[None]).min(axis=1))
