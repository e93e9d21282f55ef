"""A jaxpr in, out the same in which devices share out the trips of loops whose trips do not need each other.

`jax.lax.map` over examples is such a loop, and so is a scan that only adds up. XLA's partitioner runs every trip on all
devices, one after the other, whatever the trips have to do with each other.
"""
