"""What the units of a chip take for work that is neither matrix products at full rate nor traffic to memory."""
