"""What a backward pass reads of its forward pass in, out which of it is kept and which is computed again."""
