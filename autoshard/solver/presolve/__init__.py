"""Exact reductions of a `Problem`: smaller ones with the same optimum, and the way back."""
