"""What XLA made of a step: readers of compiled programs, beside what was predicted."""
