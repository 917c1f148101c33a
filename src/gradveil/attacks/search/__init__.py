"""Machinery: images found by descending on how badly their gradient matches, or as the solution of equations."""
