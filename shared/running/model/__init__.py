"""Build and call a model, read its answer, and find its sizes."""
