"""Compiled programs: their text, and what they communicate."""
