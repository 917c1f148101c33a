"""Machinery of attacks on sequences of tokens."""
