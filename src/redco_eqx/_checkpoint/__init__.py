"""Save states to disk, and read them back exactly."""
