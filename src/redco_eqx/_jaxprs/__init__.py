"""Traced programs: read, changed, run."""
