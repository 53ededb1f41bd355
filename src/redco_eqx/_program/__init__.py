"""Traced programs: what is put in the place of operations that would come out wrong."""
