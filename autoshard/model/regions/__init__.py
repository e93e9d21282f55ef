"""What devices run on their own shards: calls of operations, and `shard_map`s. Their strategies and their prices."""
