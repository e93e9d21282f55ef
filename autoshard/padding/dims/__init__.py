"""A step some dims of which devices do not divide: the same step with these dims padded inside."""
