"""How a model is found out by calling it: `meet` alone writes a Subject."""
