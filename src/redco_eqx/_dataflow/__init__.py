"""Layouts from the traced program: which dims are the same index, and what each split would send."""
