"""Data sets and partitions."""
