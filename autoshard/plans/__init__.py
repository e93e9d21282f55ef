"""What a plan says, as data: made of a solved problem, and written to JSON."""
