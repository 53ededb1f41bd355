"""Building blocks of layers, and the little that they communicate."""
