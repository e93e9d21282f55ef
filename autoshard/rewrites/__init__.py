"""Algebraic rewrites: laws by which a step computes the same otherwise, tried by price with ``rewrites="auto"``.

`REWRITES` has those that there are. `register` adds one:

>>> from autoshard.rewrites import REWRITES, BodyGraph, Match, register
>>> sorted(REWRITES)[:3]
['broadcast_product', 'common_factor', 'distributed_product']
"""

from autoshard.rewrites import rules
from autoshard.rewrites.graph import BodyGraph
from autoshard.rewrites.product import Operand, Product, contracted
from autoshard.rewrites.rewrite import REWRITES, Match, Rewrite, register

__all__ = ["REWRITES", "BodyGraph", "Match", "Operand", "Product", "Rewrite", "contracted", "register", "rules"]
