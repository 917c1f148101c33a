"""A run folder in, one self-contained HTML page out."""
