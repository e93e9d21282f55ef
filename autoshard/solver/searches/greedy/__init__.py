"""Searches that decide node by node, or by parts of the graph, without going back."""
