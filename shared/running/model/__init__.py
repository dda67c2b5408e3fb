"""How a model is built, called, read and sized: what a Subject records."""
