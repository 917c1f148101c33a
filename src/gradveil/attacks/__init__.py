"""Attacks, one file each. Nothing here may import a defence, a client or data."""
