"""Searches that prove what they find: integer programs and dynamic programming."""
