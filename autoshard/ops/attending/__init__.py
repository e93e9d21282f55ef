"""Attention: `attention.py` is what users call, and the operation.

`blocks.py` computes attention block by block, as FlashAttention does. `heads.py` says how heads and rows change
places between devices. `implementations.py` puts both together: all-to-all, ring, zigzag, and two levels.
"""
