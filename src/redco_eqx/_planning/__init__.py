"""Plans: a step is compiled for devices that need not be present, to find a mesh on
which it fits."""
