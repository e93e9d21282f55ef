"""Searches that learn on the problem itself: policies and values, with small networks in NumPy."""
