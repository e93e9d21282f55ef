"""Fourier transforms along split dims, as an operation with distributed implementations."""
