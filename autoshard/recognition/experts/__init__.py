"""Dropless experts that a program spells out, recognised as operations with an exchange of rows.

`sortings.py` says what arrays of integers are that follow from sorting rows by group. `regions.py` finds the equations
on sorted rows. `rewriting.py` puts operations in their place.
"""

from autoshard.recognition.experts.rewriting import with_experts

__all__ = ["with_experts"]
