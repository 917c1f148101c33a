"""Machinery: the same scores, faster."""
