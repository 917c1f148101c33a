"""Machinery: how a defence gets into a training loop, and what it did there."""
