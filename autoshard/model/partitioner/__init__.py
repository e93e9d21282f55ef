"""What `jax.jit` makes of a step by itself: the decisions of XLA's SPMD partitioner, after propagation."""
