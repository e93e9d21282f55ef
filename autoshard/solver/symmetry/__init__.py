"""What repeats itself in a `Problem`, layers of a model say, solved as one."""
