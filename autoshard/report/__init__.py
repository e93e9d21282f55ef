"""What people read of a plan, and what XLA really made of it."""
