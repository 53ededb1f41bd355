"""A model made where it lies: which of its arrays each device computes itself."""
