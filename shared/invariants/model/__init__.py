"""The model under test: how it is built, called, read and sized.

The checks see the subject alone, and draw tokens.
"""
