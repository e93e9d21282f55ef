"""autoshard: automatic sharding of JAX train steps."""
