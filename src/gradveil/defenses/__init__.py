"""Defences, one file each or one for a family; ``guard`` is how they get into a training loop."""
