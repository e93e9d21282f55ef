"""A jaxpr in, out the same in which what it computes of several arrays of one shape is computed of their stack.

Muon orthogonalises the momentum of every matrix by itself, Shampoo takes roots of every matrix of statistics. Split
over devices, each product of such a function gathers what it multiplies. In a stack of matrices, devices have whole
matrices of their own instead, which arrive and leave in one all_to_all each. Such layouts are what distributed Muon
(Liu et al. 2025, arXiv 2502.16982) and distributed Shampoo (Shi et al. 2023, arXiv 2309.06497) are built on.
"""
