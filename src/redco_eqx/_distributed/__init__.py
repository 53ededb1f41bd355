"""Many processes: joining, agreeing, failing together. Knows no model and no step."""
