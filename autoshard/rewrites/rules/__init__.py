"""The rewrites that autoshard comes with, one file per law. Importing them registers them."""

from autoshard.rewrites.rules import chains, concatenations, fused_products, loops, reductions, sums_of_products

__all__ = ["chains", "concatenations", "fused_products", "loops", "reductions", "sums_of_products"]
