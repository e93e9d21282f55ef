"""Several functions planned under one layout of the arguments that they share."""
