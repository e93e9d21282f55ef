"""Planned stages in, the step run: the one runtime of our own, and how arrays of stages become those of users."""
