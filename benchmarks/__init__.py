"""Forward-pass speed of both styles."""
