"""The terms of all rooms: leaves by path, the three functions, programs that were traced."""
