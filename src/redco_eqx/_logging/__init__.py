"""Rows of numbers, and who is told."""
