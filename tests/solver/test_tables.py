"""Tables taken apart add up again."""

import numpy as np
import pytest

from autoshard.solver import tables
from autoshard.solver.tables import ArrayMemo, classes, min_plus, split


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


def assert_known_by_entries() -> None:
    """Equal arrays are asked about once, however they lie in memory; no others share a result."""
    memo, asked = ArrayMemo(), []

    def rows(*arrays: np.ndarray) -> list:
        asked.append(arrays)
        return [array.tolist() for array in arrays]

    flat = np.arange(6.0)
    wide, tall = flat.reshape(2, 3), flat.reshape(3, 2)
    for arrays in [(flat,), (wide,), (tall,), (wide, flat), (flat, wide), (np.asfortranarray(wide),), (flat.copy(),)]:
        assert memo.once(rows, *arrays) == [array.tolist() for array in arrays]
    assert memo.once(np.sum, flat) == 15
    assert len(asked) == 5


def test_equal_arrays_are_asked_about_once():
    assert_known_by_entries()


def test_arrays_that_are_taken_for_equal_are_noticed(monkeypatch):
    class OnlyEntries(ArrayMemo):
        def once(self, function, *arrays):
            key = b"".join(array.tobytes() for array in arrays)
            return self._results.setdefault(key, function(*arrays))

    monkeypatch.setitem(globals(), "ArrayMemo", OnlyEntries)
    with pytest.raises(AssertionError):
        assert_known_by_entries()


def test_large_arrays_are_not_kept(monkeypatch):
    monkeypatch.setattr(tables, "MOST_KEY_BYTES", 47)
    memo = ArrayMemo()
    assert memo.once(np.cumsum, np.ones(6)) is not memo.once(np.cumsum, np.ones(6))
