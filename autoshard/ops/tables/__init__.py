"""Embedding tables of unequal sizes over devices, as systems for recommendation models split them."""
