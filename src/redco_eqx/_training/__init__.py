"""The loop around the steps: `fit`, `evaluate`, `predict`."""
