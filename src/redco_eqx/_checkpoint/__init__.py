"""States on disk, saved and read back exactly."""
