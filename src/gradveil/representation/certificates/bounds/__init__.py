"""Machinery: what a chain of steps can do at most, and at least."""
