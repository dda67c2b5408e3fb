"""How a model is built, called, read and sized, and what it refuses.

`meet` finds out all that a Subject records, and is its only writer.
"""
