"""The report of a plan as HTML: a second renderer of its sections, with charts and a tree of the arguments."""
