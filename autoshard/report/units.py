"""Figures in SI units in, the same in units that people read out."""

from __future__ import annotations

_BYTES = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))


def bytes_text(size: float) -> str:
    """
    >>> bytes_text(1536), bytes_text(12)
    ('1.5 KiB', '12 B')
    """
    for unit, factor in _BYTES:
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"


def seconds_text(seconds: float) -> str:
    """
    >>> seconds_text(0.00123), seconds_text(4e-8), seconds_text(0)
    ('1.23 ms', '40 ns', '0 s')
    """
    for unit, factor in _SECONDS:
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def change_text(figure: float, other: float) -> str:
    """How much more a figure is than another.

    >>> change_text(1.1, 1.0), change_text(0.5, 1.0), change_text(2.0, 2.0), change_text(300.0, 2.0)
    ('+10.00%', '-50.00%', 'same', '150 times')
    """
    if figure == other:
        return "same"
    if not other:
        return "more"
    return f"{figure / other - 1:+.2%}" if figure < 10 * other else f"{figure / other:.0f} times"
