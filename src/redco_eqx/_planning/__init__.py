"""Plans: a step compiled for devices that need not be there, to see on which mesh it fits."""
