"""Gradients of single records, their sums and their norms."""
