"""Many processes: they join, agree, and fail together. Nothing here depends on a model
or a step."""
