"""A plan as source code and rules that run without autoshard."""
