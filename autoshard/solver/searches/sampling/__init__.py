"""Searches that try choices: random walks, trees, populations, relief of bottlenecks."""
