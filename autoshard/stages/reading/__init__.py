"""A plan with stages in, answers out: why its arguments lie as they do, and the same stages under another wish."""
