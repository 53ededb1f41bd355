"""Traced programs: what is gathered in them, and what takes the place of operations that come out wrong."""
