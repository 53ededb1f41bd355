"""Compiled programs: their text, and their communication."""
