"""What XLA's compiler for CPU alone does."""
