"""Whether a step fits, and on which mesh, by compiling it for devices that need not be there."""
