"""The state of a run, and pure functions of it."""
