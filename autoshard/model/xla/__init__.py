"""What XLA's compilers do to a partitioned program that predictions have to know: one file per habit."""
