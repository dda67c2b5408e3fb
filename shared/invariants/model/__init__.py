"""The model under test: how it is built, called, read and sized."""
