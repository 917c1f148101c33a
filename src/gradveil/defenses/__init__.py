"""Defences, one file each."""
