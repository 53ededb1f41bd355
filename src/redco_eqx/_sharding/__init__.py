"""Layouts: the mesh, the two rules, and the reason for the split of each array."""
