"""The optimum, where a `Problem` is small, narrow, or left to an integer program."""
