"""From examples to batches on the mesh."""
