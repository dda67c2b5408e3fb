"""How leaks are looked for, told from rounding, and traced."""
