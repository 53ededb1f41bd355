"""What a compiled program communicates."""
