"""Replace tokens: which positions move. The map, leaks, the smallest case."""
