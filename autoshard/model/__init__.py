"""What a program costs on a machine: a `Program` to the `Problem` of sharding it, and the way back."""
