"""Call any model reproducibly: build it, and find its sizes and arguments."""
