"""Layouts from the traced program: dims that are the same index, and the bytes that
each split would send."""
