"""States on disk, exactly."""
