"""What strategies and reshardings cost in seconds, and what arrays take in bytes, on one device."""
