"""Which array is split over which mesh axis: the mesh, the two rules, their reasons."""
