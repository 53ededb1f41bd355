"""One file for each family."""
