"""Proven lower bounds of a `Problem`, and choices near them."""
