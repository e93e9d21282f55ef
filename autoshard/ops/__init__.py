"""Operations that come with distributed implementations; plain JAX without autoshard.

>>> import jax.numpy as jnp
>>> x = jnp.ones((1, 4, 2, 8))
>>> attention(x, x, x, is_causal=True).shape
(1, 4, 2, 8)
"""

from autoshard.ops.attending.attention import attention
from autoshard.ops.convolving.conv import conv
from autoshard.ops.fourier.fft import fft
from autoshard.ops.matmul import matmul
from autoshard.ops.ragged_dot import ragged_dot
from autoshard.ops.tables.embedding_tables import EmbeddingTables

__all__ = ["EmbeddingTables", "attention", "conv", "fft", "matmul", "ragged_dot"]
