"""Decoding with a cache: conventions, pieces against the whole, generate."""
