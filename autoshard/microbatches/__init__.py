"""A step as a loop over microbatches: the proof that the loop changes nothing but the order of sums, and the loop."""
