"""Searches that take a problem apart: its graph into clusters of nodes, or its options into halves."""
