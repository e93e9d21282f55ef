"""Convolutions over split images, as an operation with distributed implementations."""
