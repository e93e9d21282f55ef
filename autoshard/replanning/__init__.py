"""A plan in, what it is asked beside: why an argument lies as it does, and the plan under another wish."""
