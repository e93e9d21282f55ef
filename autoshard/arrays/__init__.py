"""Arrays that lie as a plan has them, and the parts of arguments that are the same arrays."""
