"""Bounds, each with what it rests on."""
